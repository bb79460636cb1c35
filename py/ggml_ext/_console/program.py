"""Run commands from their arguments to the exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .._base.encoding import to_json
from .._base.errors import UserError
from .._base.option import option
from .._base.text import terminal_width
from .arguments import from_namespace
from .cli import Parser, print_text, run_command
from .terminal import FORMATS, FormatOptions, Terminal


def run_program(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, Terminal], object], argv: list[str] | None
) -> int:
    """Run a command that writes a model.

    Args:
        parser: the parser of its command line.
        run: the command, with the parsed arguments.
        argv: the command line; None for that of the process.

    Returns:
        The exit code of run_command().
    """
    args = argparse.Namespace(output=None)
    terminal = Terminal(format=find_format(argv) if parser.get_default("log_format") else FORMATS[0])

    def parse_and_run() -> None:
        nonlocal terminal
        parser.parse_intermixed_args(argv, args)  # options may precede OUT
        options = from_namespace(FormatOptions, args)
        terminal = Terminal(options.log_format, quiet=options.quiet, details=not options.summary, progress=options.progress)
        run(args, terminal)

    def stopped() -> str:
        input_is_out = getattr(args, "hf_repo", None) is not None and args.output is None
        return f"{args.input if input_is_out else args.output} was not written"

    return run_command(parse_and_run, stopped, lambda text, trace: terminal.error(text, trace), args)


def find_format(argv: list[str] | None) -> str:
    """Find --log-format in a command line that may be invalid; return the default if the format is."""
    parser = Parser(add_help=False)
    parser.add_argument("--log-format", action="append", default=[])
    try:
        formats = parser.parse_known_args(argv)[0].log_format
    except UserError:
        formats = []
    return next((f for f in reversed(formats) if f in FORMATS), FORMATS[0])


class Measurement(Protocol):
    """The result of a command that measures."""

    def lines(self, width: int) -> list[str]: ...

    def record(self) -> dict: ...


@dataclass(frozen=True, kw_only=True)
class ProgressOptions:
    """Output options of commands that measure for minutes."""

    progress: bool = option(False, help="show the progress bars even if stderr is not a terminal")
    quiet: bool = option(False, short="-q", help="print tables, errors and warnings only")


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(ProgressOptions):
    """Output options of commands that measure models."""

    json: bool = option(False, help="print one JSON object instead of tables")


def run_measuring(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Terminal], Measurement], argv: list[str] | None, stopped: str
) -> int:
    """Run a command that measures models, and print its result. stopped: the message after an interrupt."""
    args = argparse.Namespace()

    def run() -> None:
        parser.parse_intermixed_args(argv, args)
        options = from_namespace(MeasuringOptions, args)
        result = measure(args, Terminal(quiet=options.quiet, progress=options.progress))
        print_text(to_json(result.record(), 1) if options.json else "\n".join(result.lines(terminal_width())))

    return run_command(run, lambda: stopped, args=args)
