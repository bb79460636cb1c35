"""Run gguf-set-metadata on files with ggml-ext types: ggml-ext set-metadata [options of gguf-set-metadata] FILE KEY VALUE"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

import gguf
from gguf.scripts import gguf_set_metadata

from ._base.errors import UserError
from ._console.gguf_program import check_header, run_editor

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def to_bool(text: str) -> bool:
    """Parse a boolean, because numpy converts any text, "false" too, to True."""
    if text.lower() not in BOOLEANS:
        raise UserError(f"VALUE: got {text!r}, must be true or false")
    return BOOLEANS[text.lower()]


def edit() -> None:
    """Run gguf's program, which changes the value in place."""

    def open_reader(path: str, mode: Literal["r", "r+", "c"]) -> gguf.GGUFReader:
        check_header(Path(path))
        reader = gguf.GGUFReader(path, mode)
        converters: dict[gguf.GGUFValueType, Any] = {**reader.gguf_scalar_to_np, gguf.GGUFValueType.BOOL: to_bool}
        reader.gguf_scalar_to_np = converters
        return reader

    def fail(message: str) -> NoReturn:
        raise UserError(message.removeprefix("! "))

    with mock.patch.object(gguf_set_metadata, "GGUFReader", open_reader), mock.patch.object(gguf_set_metadata.logger, "error", fail):
        gguf_set_metadata.main()


def main(argv: list[str] | None = None, prog: str = "ggml-ext set-metadata") -> int:
    """Run the command; see run_command() for the exit code."""
    return run_editor(edit, argv, prog)


if __name__ == "__main__":
    sys.exit(main())
