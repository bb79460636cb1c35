"""The commands: from their arguments to the exit code, and what several of them share."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

from .._base.encoding import to_json
from .._base.text import terminal_width
from .cli import add_common_options, add_device_options, add_threads_option, print_text, run_command
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


class Measured(Protocol):
    """What a command found that measures."""

    def lines(self, width: int) -> list[str]: ...

    def record(self) -> dict: ...


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Of commands that run models and print what they found; --json is theirs, in the place that suits their flags."""
    add_threads_option(parser)
    add_device_options(parser)
    parser.add_argument("--progress", action="store_true", help="show the progress bars even if stderr is no terminal")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the tables, errors and warnings only")
    add_common_options(parser)


def run_measuring(
    parser: Callable[[], argparse.ArgumentParser], measure: Callable[[argparse.Namespace, Terminal], Measured], argv: list[str] | None, stopped: str
) -> int:
    """Exit code, as run_command() has it. measure: its result is printed, with --json as one object. stopped: what to say of an interrupt."""
    args, way_out = argparse.Namespace(), "pass it to a program that reads it all"

    def run() -> None:
        parser().parse_intermixed_args(argv, args)
        found = measure(args, Terminal(way_out, quiet=args.quiet, progress=args.progress))
        print_text(to_json(found.record(), 1) if args.json else "\n".join(found.lines(terminal_width())), way_out)

    return run_command(run, lambda: stopped, way_out, args=args)
