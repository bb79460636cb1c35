"""Quantize a model: ggml-ext quantize IN OUT --type itq3_t"""

from __future__ import annotations

import argparse
import sys

from ._allocation.target import DEFAULT_TYPES, UPSTREAM_TYPES
from ._base.types import WEIGHT_TYPES
from ._commands.options import QuantizeOptions
from ._commands.quantizing import quantize
from ._commands.settings import Settings
from ._console import arguments
from ._console.program import run_program
from ._console.terminal import FormatOptions, Terminal
from ._formats.names import list_types_by_bits
from ._plan.file_types import FP4_FILES, UPSTREAM_ALIASES, UPSTREAM_FILES
from ._plan.recipes import RECIPES
from ._plan.uses import SMALL_FLOOR, SMALL_PART


def build_parser(prog: str = "ggml-ext quantize") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, QuantizeOptions, FormatOptions, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=describe_types(),
        description="Quantize a GGUF model in F32, F16, BF16 or Q8_0, or a Hugging Face checkpoint.",
    )


def describe_types() -> str:
    """Describe the types of --type and --target-types, for the end of --help."""
    types = [
        f"  {t.name}: {t.bpw:g} bpw; token embeddings {t.token_embd}, output matrix {t.output}; {t.fallback} if rows are not a "
        f"multiple of {t.block_size}"
        for t in WEIGHT_TYPES.values()
    ]
    return "\n".join([
        "ggml-ext types:", *types, "quant mixes:", *(f"  {r.name}: {r.about}" for r in RECIPES.values()),
        "standard GGUF types and mixes, with the types that llama-quantize gives each tensor:", *list_types_by_bits([*UPSTREAM_FILES, *UPSTREAM_ALIASES]),
        f"4-bit floats, with the types that llama-quantize gives q4_0: {', '.join(FP4_FILES)}",
        "A target chooses from these types and the type of the input:", f"  {', '.join(DEFAULT_TYPES)}",
        "With --stock it chooses from:", f"  {', '.join(UPSTREAM_TYPES)}",
        "Without output.weight, the token embeddings get the type of the output matrix.",
        "Vectors, norms and expert routing keep their type, as with llama-quantize.",
        f"Matrices with less than 1/{1 / SMALL_PART:.0f} of their layer's weights get at least {SMALL_FLOOR.name.lower()}, unless --type is a standard type or --pure is given.",
    ])


def main(argv: list[str] | None = None, prog: str = "ggml-ext quantize") -> int:
    """Run the command and return its exit code, as run_program() documents it."""

    def run(args: argparse.Namespace, terminal: Terminal) -> None:
        quantize(Settings.parse(arguments.from_namespace(QuantizeOptions, args)), terminal)

    return run_program(build_parser(prog), run, argv)


if __name__ == "__main__":
    sys.exit(main())
