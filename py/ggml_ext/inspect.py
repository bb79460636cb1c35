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
from ._report.findings import Finding, columns_of, row_writer, shape_of


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """What the command prints."""

    json: bool = option(False, help="print one JSON object instead of the table")


def build_parser(prog: str = "ggml-ext inspect") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, InspectOptions, PrintOptions,
        description="List the tensors of a GGUF file with their types and bits per weight. For ditto3, list epsilon too: the largest error "
        "of a weight, so that |W x - W' x|_inf <= epsilon * |x|_1.",
    )


class Table:
    """The table of findings, printed row by row."""

    def __init__(self, has_original: bool):
        self._has_original = has_original
        self._weighted = False
        self._line_of: Callable[..., str] | None = None

    def begin(self, tensors: list[Tensor], importance: Importance) -> None:
        self._weighted = importance.matrix is not None
        self._line_of = row_writer(tensors, self._weighted)
        weighted = ["weighted"] if self._weighted else []
        errors = ["rel. sq. err.", *weighted, "largest error", "check"] if self._has_original else []
        self._print("tensor", "shape", "type", "bpw", "epsilon", *errors)

    def add(self, finding: Finding) -> None:
        tensor = finding.tensor
        self._print(tensor.name, shape_of(tensor), tensor.type.name.lower(), *columns_of(finding, self._weighted))

    def _print(self, *columns: str) -> None:
        assert self._line_of is not None  # begin() comes first
        print_text(self._line_of(*columns))


def run(args: argparse.Namespace) -> None:
    """Run the command on a parsed command line. Raise UserError for what the user can change."""
    options, is_json = arguments.from_namespace(InspectOptions, args), arguments.from_namespace(PrintOptions, args).json
    table = Table(options.against is not None)
    inspection = inspect(options, *((lambda *_: None, lambda *_: None) if is_json else (table.begin, table.add)))
    print_text(to_json(inspection.record(), 1) if is_json else "\n".join(inspection.lines()))
    if options.picture is not None and not draw_picture(options, inspection):
        print("note: --picture: the font has no characters for some names, and boxes in their place: name a .svg", file=sys.stderr)
    check_bounds(inspection)


def main(argv: list[str] | None = None, prog: str = "ggml-ext inspect") -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()
    return run_command(
        lambda: run(build_parser(prog).parse_args(argv, args)), lambda: "nothing was changed", args=args
    )


if __name__ == "__main__":
    sys.exit(main())
