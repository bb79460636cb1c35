"""Lists a GGUF file, counts its codes and checks it against its original: python -m ggml_ext.inspect FILE [--against ORIGINAL]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ._base.encoding import to_json
from ._calibration.importance import Importance
from ._commands.inspecting import InspectOptions, check_bounds, draw_picture, inspect
from ._console.cli import Parser, add_common_options, add_threads_option, print_text, run_command
from ._console.program import options_of
from ._formats.gguf_file import Tensor
from ._report.findings import Finding, columns_of, row_writer, shape_of

WAY_OUT = "pass it to a program that reads it all"


def build_parser(prog: str = "ggml-ext inspect") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Lists the tensors of a GGUF file, their types and bits per weight and, for ditto3, epsilon: the largest "
        "error of a weight, with which |W x - W' x|_inf <= epsilon * |x|_1.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="GGUF file, or the first of the parts of a split one")
    parser.add_argument(
        "--against",
        metavar="ORIGINAL",
        type=Path,
        help="the file it was made from: compute the errors of all tensors and check them against epsilon; exit code 1 "
        "if one is larger",
    )
    parser.add_argument(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="with --against: show errors weighed with this importance matrix too, with its second moments if it has some",
    )
    parser.add_argument(
        "--importance", metavar="{diagonal,block,full}", help="what to weigh them with; default: the most that --imatrix holds"
    )
    parser.add_argument(
        "--tensor",
        metavar="REGEX",
        help="only the tensors whose name matches, in whole or in part, such as blk.3.attn_q.weight or ffn_",
    )
    parser.add_argument(
        "--histograms",
        action="store_true",
        help="count the codes and scales of each type of ggml-ext, in samples of large tensors",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="with --against: draw the errors by layer and class into this .svg or .png file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("-f", "--force", action="store_true", help="replace the file of --picture if it exists")
    add_threads_option(parser)
    add_common_options(parser)
    return parser


class Table:
    """The findings on standard output, as they are made."""

    def __init__(self, has_original: bool):
        self._has_original = has_original
        self._weighted, self._line_of = False, None

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
        print_text(self._line_of(*columns), WAY_OUT)


def run(args: argparse.Namespace) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    asked = options_of(InspectOptions, args)
    table = Table(asked.against is not None)
    silent: Callable = lambda *_: None  # noqa: E731
    found = inspect(asked, silent if args.json else table.begin, silent if args.json else table.add)
    print_text(to_json(found.record(), 1) if args.json else "\n".join(found.lines()), WAY_OUT)
    if asked.picture is not None and not draw_picture(asked, found):
        print("note: --picture: the font has no characters for some names, and boxes in their place: name a .svg", file=sys.stderr)
    check_bounds(found)


def main(argv: list[str] | None = None, prog: str = "ggml-ext inspect") -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()
    return run_command(
        lambda: run(build_parser(prog).parse_args(argv, args)), lambda: "nothing was changed", WAY_OUT, args=args
    )


if __name__ == "__main__":
    sys.exit(main())
