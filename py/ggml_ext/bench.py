"""Measure the speed of models: ggml-ext bench MODEL..."""

from __future__ import annotations

import argparse
import sys

from ._commands.benching import UPSTREAM_BPW, BenchOptions, Speeds, bench
from ._console import arguments
from ._console.program import MeasuringOptions, run_measuring
from ._console.terminal import Terminal


def build_parser(prog: str = "ggml-ext bench") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, BenchOptions, MeasuringOptions,
        description="Measure the tokens per second of prompt processing and token generation, compared with standard GGUF files of the same "
        "model, which are made temporarily from the first model.",
        epilog="Absolute speeds depend on the machine's load; ratios are more stable. "
        f"Types of --stock: {', '.join(UPSTREAM_BPW)}.",
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext bench") -> int:
    """Run the command and return its exit code, as run_program() documents it."""

    def run(args: argparse.Namespace, terminal: Terminal) -> Speeds:
        return bench(arguments.from_namespace(BenchOptions, args), terminal)

    return run_measuring(build_parser(prog), run, argv, "the temporary files were removed")


if __name__ == "__main__":
    sys.exit(main())
