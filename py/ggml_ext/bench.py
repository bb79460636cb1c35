"""How fast models are beside stock files of the same model: ggml-ext bench MODEL..., or python -m ggml_ext.bench"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._base.encoding import to_json
from ._base.text import columns
from ._console.cli import Parser, add_common_options, add_device_options, add_threads_option, print_text, run_command
from ._console.program import options_of
from ._console.terminal import Terminal
from ._jobs.benching import STOCK, BenchOptions, bench

WAY_OUT = "pass it to a program that reads it all"


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
    add_threads_option(parser)
    add_device_options(parser)
    add("--progress", action="store_true", help="show the progress bars even if stderr is no terminal")
    add("-q", "--quiet", action="store_true", help="print the table, errors and warnings only")
    add_common_options(parser)
    return parser


def main(argv: list[str] | None = None, prog: str = "ggml-ext-bench") -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()

    def run() -> None:
        build_parser(prog).parse_intermixed_args(argv, args)
        found = bench(options_of(BenchOptions, args), Terminal(WAY_OUT, quiet=args.quiet, progress=args.progress))
        print_text(to_json(found.record(), 1) if args.json else "\n".join(found.lines(columns())), WAY_OUT)

    return run_command(run, lambda: "the stock files were removed", WAY_OUT, args=args)


if __name__ == "__main__":
    sys.exit(main())
