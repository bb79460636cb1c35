"""Convert a LoRA adapter for a model with column scales: ggml-ext scale-adapter MODEL ADAPTER OUT"""

from __future__ import annotations

import argparse
import sys

from ._commands.scaling_adapters import ScaleAdapterOptions, scale_adapter
from ._console import arguments
from ._console.cli import print_text, run_command


def build_parser(prog: str = "ggml-ext scale-adapter") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, ScaleAdapterOptions,
        description="Convert a LoRA adapter of an original model for a file with column scales. Programs of ggml-ext take the adapter as it is; "
        "an unmodified llama.cpp needs the converted one.",
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext scale-adapter") -> int:
    """Run the command and return its exit code, as run_program() documents it."""
    args = argparse.Namespace()

    def run() -> None:
        build_parser(prog).parse_intermixed_args(argv, args)
        print_text(scale_adapter(arguments.from_namespace(ScaleAdapterOptions, args)))

    return run_command(run, lambda: "nothing was written", args=args)


if __name__ == "__main__":
    sys.exit(main())
