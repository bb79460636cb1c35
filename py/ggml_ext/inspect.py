"""List the tensors of a GGUF file and check them against its original: ggml-ext inspect FILE --against ORIGINAL"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ._base.encoding import to_json
from ._base.option import option
from ._calibration.importance import Importance
from ._commands.inspecting import InspectOptions, check_bounds, draw_picture, inspect
from ._console import arguments
from ._console.cli import print_text, run_command
from ._formats.gguf_file import Tensor
from ._report.findings import Finding, format_columns, format_shape, make_row_formatter


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """The format of the output."""

    json: bool = option(False, help="print one JSON object instead of the table")


def build_parser(prog: str = "ggml-ext inspect") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, InspectOptions, PrintOptions,
        description="List the tensors of a GGUF file with their types and bits per weight. For ditto3, list epsilon too: the largest error "
        "of a weight, so that |W x - W' x|_inf <= epsilon * |x|_1.",
    )


class Table:
    """A table that is printed row by row."""

    def __init__(self, has_original: bool):
        self._has_original = has_original
        self._weighted = False
        self._format_row: Callable[..., str] | None = None

    def begin(self, tensors: list[Tensor], importance: Importance) -> None:
        self._weighted = importance.matrix is not None
        self._format_row = make_row_formatter(tensors, self._weighted)
        weighted = ["weighted"] if self._weighted else []
        errors = ["NMSE", *weighted, "largest error", "check"] if self._has_original else []
        self._print("tensor", "shape", "type", "bpw", "epsilon", *errors)

    def add(self, finding: Finding) -> None:
        tensor = finding.tensor
        self._print(tensor.name, format_shape(tensor), tensor.type.name.lower(), *format_columns(finding, self._weighted))

    def _print(self, *columns: str) -> None:
        assert self._format_row is not None  # set by begin()
        print_text(self._format_row(*columns))


def run(args: argparse.Namespace) -> None:
    """Run the command on a parsed command line. Raise UserError for what the user can change."""
    options, is_json = arguments.from_namespace(InspectOptions, args), arguments.from_namespace(PrintOptions, args).json
    table = Table(options.against is not None)
    inspection = inspect(options, *((lambda *_: None, lambda *_: None) if is_json else (table.begin, table.add)))
    print_text(to_json(inspection.record(), 1) if is_json else "\n".join(inspection.lines()))
    if options.picture is not None and not draw_picture(options, inspection):
        print("note: --picture: the font lacks characters of some names and shows boxes: name a .svg file", file=sys.stderr)
    check_bounds(inspection)


def main(argv: list[str] | None = None, prog: str = "ggml-ext inspect") -> int:
    """Run the command and return its exit code, as run_program() documents it."""
    args = argparse.Namespace()
    return run_command(
        lambda: run(build_parser(prog).parse_args(argv, args)), lambda: "nothing was changed", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
