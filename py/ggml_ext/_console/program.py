"""The commands that make a model: from their arguments to the exit code."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from .cli import run_command
from .terminal import FORMATS, Terminal

Options = TypeVar("Options")


def options_of(kind: type[Options], args: argparse.Namespace) -> Options:
    """The fields of a dataclass of options, from the arguments of the same names."""
    return kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})


def run_program(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, Terminal], object], argv: list[str] | None, way_out: str,
    format: str = FORMATS[0],
) -> int:
    """Exit code, as run_command() has it. way_out: what to do if standard output cannot be written; format: of the line about a bad
    command line."""
    args = argparse.Namespace(output=None)
    terminal = Terminal(way_out, format)

    def parse_and_run() -> None:
        nonlocal terminal
        parser.parse_intermixed_args(argv, args)  # OUT may stand after options
        terminal = Terminal(way_out, getattr(args, "log_format", format), args.quiet, not args.summary, args.progress)
        run(args, terminal)

    def stopped() -> str:
        is_out_alone = getattr(args, "hf_repo", None) is not None and args.output is None
        return f"{args.input if is_out_alone else args.output} was not written"

    return run_command(parse_and_run, stopped, way_out, lambda *said: terminal.error(*said), args)
