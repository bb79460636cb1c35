"""Run gguf-new-metadata on files with ggml-ext types: ggml-ext new-metadata [options of gguf-new-metadata] IN OUT"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import gguf
from gguf.scripts import gguf_new_metadata
from tqdm import tqdm

from ._base.files import write_atomically
from ._console.gguf_program import check_header, run_editor
from ._formats.reserved_paths import ReservedPaths, reserve_output


def copy() -> None:
    """Run gguf's program with checked inputs and an OUT that is written atomically."""
    source = Path()

    def open_reader(path: Path, mode: Literal["r", "r+", "c"]) -> gguf.GGUFReader:
        nonlocal source
        source = path
        check_header(path)
        return reader(path, mode)

    def open_writer(path: Path, **kwargs: Any) -> gguf.GGUFWriter:
        reserve_output(ReservedPaths({source: "IN"}), path, force=True)  # gguf's program has asked the user
        return writer(stack.enter_context(write_atomically(path)), **kwargs)

    def open_bar(**kwargs: Any) -> tqdm:
        return stack.enter_context(tqdm(**kwargs, disable=None))  # only on a terminal; closed before an error is printed

    reader, writer = gguf.GGUFReader, gguf.GGUFWriter
    with contextlib.ExitStack() as stack:
        for owner, name, function in ((gguf, "GGUFReader", open_reader), (gguf, "GGUFWriter", open_writer), (gguf_new_metadata, "tqdm", open_bar)):
            stack.enter_context(mock.patch.object(owner, name, function))
        gguf_new_metadata.main()


def main(argv: list[str] | None = None, prog: str = "ggml-ext new-metadata") -> int:
    """Run the command; see run_command() for the exit code."""
    return run_editor(copy, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
