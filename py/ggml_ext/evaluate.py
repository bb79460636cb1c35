"""How good files are: ggml-ext evaluate MODEL... --against F16, or python -m ggml_ext.evaluate"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._commands.evaluating import EvaluateOptions, evaluate
from ._console.cli import Parser
from ._console.program import add_measuring_options, options_of, run_measuring
from ._formats.context import N_CONTEXT


def build_parser(prog: str = "ggml-ext-evaluate") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Measures models on a text: perplexity and, against the model that they were made from, KL divergence and how often "
        "both think the same token the most probable; differences between the models with paired errors; tasks with several answers.",
        epilog="The text that comes with the package is prose, code and manuals, none of which is in the built-in calibration text.",
    )
    add = parser.add_argument
    add("models", metavar="MODEL", type=Path, nargs="+", help="GGUF models, of a split one any part; differences are against the first")
    add("--against", metavar="F16", type=Path, help="the model that they were made from")
    add("-f", "--file", metavar="TEXT", type=Path, help="text to score; default: that of the package")
    add(
        "-c", "--ctx-size", metavar="N", type=int,
        help=f"tokens of a chunk, of which the second half is scored; default {N_CONTEXT}, or what the models were trained with if that is less",
    )
    add("--chunks", metavar="N", type=int, help="chunks to score; default: the whole text")
    add("-b", "--batch-size", metavar="N", type=int, help="tokens to compute at once; default: a chunk")
    add(
        "--base-logits", metavar="FILE", type=Path,
        help="where the logits of --against are kept for the next evaluation; default: beside it. Without --against: such a file, or one "
        "that llama-perplexity --kl-divergence-base wrote",
    )
    add("--hellaswag", metavar="FILE", type=Path, help="tasks to choose the end of a sentence, as llama-perplexity --hellaswag reads them")
    add("--winogrande", metavar="FILE", type=Path, help="tasks to find what a word stands for, as llama-perplexity --winogrande reads them")
    add("--multiple-choice", metavar="FILE", type=Path, help="questions with answers to choose from, as llama-perplexity --multiple-choice reads them")
    add("--tasks", metavar="N", type=int, help="questions of each of these; default: 400 of --hellaswag, else all")
    add("--picture", metavar="FILE", type=Path, help="draw KL divergence or perplexity over size into this .svg or .png file")
    add("--json", action="store_true", help="print one JSON object in place of the tables")
    add("--force", action="store_true", help="replace the file of --picture if it exists")
    add_measuring_options(parser)
    return parser


def main(argv: list[str] | None = None, prog: str = "ggml-ext-evaluate") -> int:
    """Entry point; see run_command() for the exit code."""
    return run_measuring(
        lambda: build_parser(prog), lambda args, terminal: evaluate(options_of(EvaluateOptions, args), terminal), argv, "logits of the base that are whole are kept"
    )


if __name__ == "__main__":
    sys.exit(main())
