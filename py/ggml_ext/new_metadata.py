"""gguf-new-metadata for files with our types: python -m ggml_ext.new_metadata [options of gguf-new-metadata] IN OUT"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import gguf
from gguf.scripts import gguf_new_metadata
from tqdm import tqdm

from ._base.files import write_atomically
from ._console.gguf_program import check_header, run_editor
from ._output.paths import Taken, check_output


def copy() -> None:
    """gguf's program, whose OUT gets its name when it is whole."""
    source = Path()

    def open_reader(path: Path, mode: str) -> gguf.GGUFReader:
        nonlocal source
        source = path
        check_header(path)
        return reader(path, mode)

    def open_writer(path: Path, **kwargs) -> gguf.GGUFWriter:
        check_output(Taken({source: "IN"}), path, force=True)  # it has asked, or was told to
        return writer(stack.enter_context(write_atomically(path)), **kwargs)

    def show(**kwargs) -> tqdm:
        return stack.enter_context(tqdm(**kwargs, disable=None))  # on a terminal, and its line ends before an error's

    reader, writer = gguf.GGUFReader, gguf.GGUFWriter
    with contextlib.ExitStack() as stack:
        for owner, name, ours in ((gguf, "GGUFReader", open_reader), (gguf, "GGUFWriter", open_writer), (gguf_new_metadata, "tqdm", show)):
            stack.enter_context(mock.patch.object(owner, name, ours))
        gguf_new_metadata.main()


def main(argv: list[str] | None = None, prog: str = "ggml-ext-new-metadata") -> int:
    """Entry point; see run_command() for the exit code."""
    return run_editor(copy, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
