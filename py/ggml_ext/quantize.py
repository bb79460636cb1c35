"""Quantizes a GGUF model to one of our types: python -m ggml_ext.quantize IN OUT --type itq3_s"""

from __future__ import annotations

import argparse
import sys

from ._commands.quantizing import quantize
from ._commands.settings import QuantizeOptions, Settings
from ._console.options import asked_format, build_parser
from ._console.program import options_of, run_program
from ._console.terminal import Terminal
from ._output.conversion import WAY_OUT


def main(argv: list[str] | None = None, prog: str = "ggml-ext quantize") -> int:
    """Entry point; see run_command() for the exit code."""

    def run(args: argparse.Namespace, terminal: Terminal) -> None:
        quantize(Settings.parse(options_of(QuantizeOptions, args)), terminal)

    return run_program(build_parser(prog), run, argv, WAY_OUT, asked_format(argv))


if __name__ == "__main__":
    sys.exit(main())
