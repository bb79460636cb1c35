"""Turns a file with our types into one that stock llama.cpp loads: python -m ggml_ext.export IN OUT --type q4_k"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._commands.exporting import STOCK_TYPES, ExportOptions, ExportSettings, export
from ._console.cli import Parser, add_common_options, add_terminal_options, add_threads_option
from ._console.program import options_of, run_program
from ._console.terminal import Terminal
from ._output.conversion import WAY_OUT


def build_parser(prog: str = "ggml-ext export") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Writes a GGUF model that has types of ggml-ext with llama.cpp's own types, and says what that costs.",
        epilog="Tensors that have stock types already are copied as they are, but with a type of floats or --pure. An output "
        "matrix in a type of ggml-ext becomes q6_k where TYPE has fewer bits, as llama-quantize would make it.",
    )
    add = parser.add_argument
    add("input", metavar="IN", type=Path, help="GGUF model with types of ggml-ext, of a split one any part")
    add("output", metavar="OUT", type=Path, nargs="?", help="file to write; not needed with --dry-run")
    add("--type", metavar="TYPE", required=True, help=f"type in place of ours: {', '.join(sorted(STOCK_TYPES))}")
    add("--pure", action="store_true", help="TYPE for all quantized tensors, also for those in stock types and the output matrix")
    add(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="stock type for quantized tensors whose name matches; may be repeated, the first match counts",
    )
    add("--imatrix", metavar="FILE", type=Path, help="importance matrix of llama-imatrix, which iq1_*, iq2_* and iq3_xxs need; its second moments are used if it has some")
    add("--no-fallback", action="store_true", help="refuse a model with rows that the types do not fit")
    add_threads_option(parser)
    add("--dry-run", action="store_true", help="show types and sizes, write nothing")
    add("--model-card", metavar="FILE", type=Path, help="write a card for the Hugging Face hub to this file, such as README.md")
    add("-f", "--force", action="store_true", help="replace OUT if it exists")
    add_terminal_options(parser)
    add_common_options(parser)
    return parser


def main(argv: list[str] | None = None, prog: str = "ggml-ext export") -> int:
    """Entry point; see run_command() for the exit code."""

    def run(args: argparse.Namespace, terminal: Terminal) -> None:
        export(ExportSettings.parse(options_of(ExportOptions, args)), terminal)

    return run_program(build_parser(prog), run, argv, WAY_OUT)


if __name__ == "__main__":
    sys.exit(main())
