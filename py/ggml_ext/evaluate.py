"""Measure the quality of models: ggml-ext evaluate MODEL... --against F16"""

from __future__ import annotations

import argparse
import sys

from ._commands.evaluating import EvaluateOptions, evaluate
from ._console import arguments
from ._console.program import MeasuringOptions, run_measuring
from ._console.terminal import Terminal
from ._report.quality import Evaluation


def build_parser(prog: str = "ggml-ext evaluate") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, EvaluateOptions, MeasuringOptions,
        description="Measure perplexity, KL divergence and top-1 agreement of models on a text, paired differences between them, and the "
        "accuracy on multiple-choice tasks.",
        epilog="The built-in text is prose, code and manuals. None of it is in the built-in calibration text.",
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext evaluate") -> int:
    """Run the command and return its exit code, as run_program() documents it."""

    def run(args: argparse.Namespace, terminal: Terminal) -> Evaluation:
        return evaluate(arguments.from_namespace(EvaluateOptions, args), terminal)

    return run_measuring(build_parser(prog), run, argv, "complete logits stay in the cache")


if __name__ == "__main__":
    sys.exit(main())
