"""Convert a model to standard GGUF types: ggml-ext export IN OUT --type q4_k"""

from __future__ import annotations

import argparse
import sys

from ._commands.exporting import UPSTREAM_TYPES, ExportOptions, ExportSettings, export
from ._console import arguments
from ._console.program import run_program
from ._console.terminal import Terminal, TerminalOptions
from ._formats.names import list_types_by_bits


def build_parser(prog: str = "ggml-ext export") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, ExportOptions, TerminalOptions,
        description="Convert a GGUF model with ggml-ext types to llama.cpp's own types, and report the error that this adds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join([
            "Tensors that have standard types are copied, unless TYPE is a float type or --pure is given.",
            "An output matrix in a ggml-ext type becomes q6_k if TYPE has fewer bits, as with llama-quantize.",
            "Types:", *list_types_by_bits(sorted(UPSTREAM_TYPES)),
        ]),
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext export") -> int:
    """Run the command and return its exit code, as run_program() documents it."""

    def run(args: argparse.Namespace, terminal: Terminal) -> None:
        export(ExportSettings.parse(arguments.from_namespace(ExportOptions, args)), terminal)

    return run_program(build_parser(prog), run, argv)


if __name__ == "__main__":
    sys.exit(main())
