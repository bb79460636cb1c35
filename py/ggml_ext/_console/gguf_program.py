"""Run gguf's programs with the package's command line, errors and types."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from .._base.errors import UserError
from .._formats.gguf_file import BigEndianFile, GGUFFile
from .cli import Parser, add_common_options, run_command, writing_to_stdout


def check_header(path: Path) -> None:
    """Raise UserError for a damaged file, because gguf's reader does not check counts and sizes."""
    with contextlib.suppress(BigEndianFile):  # gguf can read these
        GGUFFile(path)


def run_editor(edit: Callable[[], None], argv: list[str] | None, prog: str) -> int:
    """Run a program of gguf that changes metadata, and return the exit code of run_command(). edit: runs the program."""
    args = argparse.Namespace()

    def run() -> None:
        parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
        add_common_options(parser)
        _, words = parser.parse_known_args(argv, args)
        bad_command_line = mock.patch.object(argparse.ArgumentParser, "error", Parser.error)
        with bad_command_line, mock.patch.object(sys, "argv", [prog, *words]), writing_to_stdout():
            try:
                edit()
            except EOFError as e:  # the program asks for a YES
                raise UserError("confirmation is needed, and standard input is closed: pass --force") from e
            except OSError as e:
                raise UserError(f"{e.filename or 'cannot write'}: {e.strerror or e}") from e
            except (ValueError, LookupError, OverflowError) as e:  # a value does not fit its key
                raise UserError(" ".join(str(e.args[0] if e.args else e).split())) from e

    return run_command(run, lambda: "nothing was changed", args=args)
