"""gguf-dump for files with our types: python -m ggml_ext.dump [options of gguf-dump] FILE"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from gguf.scripts import gguf_dump

from ._base.encoding import to_utf8
from ._base.errors import UserError
from ._console.cli import Parser, add_common_options, run_command
from ._console.gguf_program import check_header, command_line

WAY_OUT = "pass it to a program that reads it all"


def run(argv: list[str], args: argparse.Namespace, prog: str) -> None:
    """gguf-dump's own program on a file whose header was checked: its reader trusts the counts and sizes in the file.

    args: gets what is ours of the command line.
    """
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("file", type=Path, nargs="?")
    add_common_options(parser)
    _, others = parser.parse_known_args(argv, args)  # gguf-dump's, none of which takes a value
    if args.file is not None and not {"-h", "--help"} & set(others):
        check_header(args.file)
    name = [] if args.file is None else [str(args.file)]
    command = [prog, *others, "--", *name] if name and name[0].startswith("-") else [prog, *name, *others]
    with any_text(), command_line(command, WAY_OUT):
        gguf_dump.logger.setLevel(logging.WARNING)  # or it tells on stderr which file it loads
        try:
            gguf_dump.main()
        except (ValueError, IndexError, KeyError, OverflowError) as e:  # of its reader
            raise UserError(f"{args.file}: truncated or corrupt: {e}; download or convert it again") from e


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """Within it gguf-dump writes the names of files as to_utf8() has them, and \\u20ac and the like where the stream lacks a character."""

    def with_shown_name(dump: Callable) -> Callable:
        return lambda reader, args: dump(reader, argparse.Namespace(**vars(args) | {"model": to_utf8(args.model)}))

    with contextlib.ExitStack() as stack:
        for name in ("dump_metadata_json", "dump_markdown_metadata"):
            stack.enter_context(mock.patch.object(gguf_dump, name, with_shown_name(getattr(gguf_dump, name))))
        if (stdout := sys.stdout) is not None and hasattr(stdout, "reconfigure"):
            stack.callback(stdout.reconfigure, errors=stdout.errors)
            stdout.reconfigure(errors="backslashreplace")
        yield


def main(argv: list[str] | None = None, prog: str = "ggml-ext-dump") -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()
    return run_command(
        lambda: run(sys.argv[1:] if argv is None else argv, args, prog), lambda: "nothing was changed", WAY_OUT, args=args
    )


if __name__ == "__main__":
    sys.exit(main())
