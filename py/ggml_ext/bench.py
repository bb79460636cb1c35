"""How fast models are beside stock files of the same model: ggml-ext bench MODEL..., or python -m ggml_ext.bench"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._commands.benching import STOCK, BenchOptions, bench
from ._console.cli import Parser
from ._console.program import add_measuring_options, options_of, run_measuring


def build_parser(prog: str = "ggml-ext-bench") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Measures how many tokens a second models read and write, in turn with stock files of the same model, and prints the "
        "ratios. The stock files are made from the first model for that time, beside it.",
        epilog="A processor that others use gives other speeds; ratios bear that better.",
    )
    add = parser.add_argument
    add("models", metavar="MODEL", type=Path, nargs="+", help="GGUF models, of a split one any part")
    add(
        "--stock", metavar="LIST",
        help=f"stock types to compare with, with commas, or none, where the second MODEL takes their place: {', '.join(STOCK)}; default: the "
        "next smaller and the next larger one than the first MODEL",
    )
    add("-p", "--n-prompt", metavar="N", type=int, default=BenchOptions.n_prompt, help=f"tokens to read; default {BenchOptions.n_prompt}")
    add("-n", "--n-gen", metavar="N", type=int, default=BenchOptions.n_gen, help=f"tokens to write; default {BenchOptions.n_gen}")
    add("-r", "--rounds", metavar="N", type=int, default=BenchOptions.rounds, help=f"runs of each model; default {BenchOptions.rounds}")
    add("--json", action="store_true", help="print one JSON object in place of the table")
    add_measuring_options(parser)
    return parser


def main(argv: list[str] | None = None, prog: str = "ggml-ext-bench") -> int:
    """Entry point; see run_command() for the exit code."""
    return run_measuring(
        lambda: build_parser(prog), lambda args, terminal: bench(options_of(BenchOptions, args), terminal), argv, "the stock files were removed"
    )


if __name__ == "__main__":
    sys.exit(main())
