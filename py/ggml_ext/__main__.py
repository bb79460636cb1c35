"""ggml-ext and python -m ggml_ext: run a command by its name."""

from __future__ import annotations

import argparse
import importlib
import sys

from ._base.errors import UserError
from ._console.cli import Parser, add_common_options, print_text, run_command

# in the order of --help; each is a module, except serve
COMMANDS = {
    "quantize": "quantize a model to low-bit types",
    "evaluate": "measure perplexity, KL divergence and tasks",
    "bench": "measure the speed against standard GGUF files of the same model",
    "serve": "run llama-server, with its options: ggml-ext serve -m MODEL",
    "inspect": "list the tensors of a file, with types and errors",
    "export": "convert ggml-ext types to those that every llama.cpp loads",
    "scale-adapter": "convert a LoRA adapter for a model with column scales",
    "upload": "upload a file and its model card to the Hugging Face hub",
    "new-metadata": "run gguf-new-metadata: copy a file with another name, chat template or special tokens",
    "set-metadata": "run gguf-set-metadata: change the value of a key in a file",
    "gpu-report": "check the kernels on the GPUs of this machine, and write a report for the maintainers",
    "libdir": "print the directory of the libraries, for programs that load libllama",
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ggml-ext",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ggml-ext COMMAND ...",
        description="commands:\n" + "\n".join(f"  {name:13} {about}" for name, about in COMMANDS.items()),
        epilog="ggml-ext COMMAND --help lists the options of a command.",
    )
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=argparse.SUPPRESS)
    add_common_options(parser)
    return parser


def run_without_command(argv: list[str]) -> int:
    """Print the list of commands, or an error for an unknown one. Return the exit code."""
    args = argparse.Namespace()

    def run() -> None:
        parser = build_parser()
        parser.parse_args(argv, args)
        if args.command is not None:
            raise UserError(f"unknown command {args.command!r}: must be one of {', '.join(COMMANDS)}")
        print_text(parser.format_help().rstrip())

    return run_command(run, lambda: "nothing was changed", args=args)


def main(argv: list[str] | None = None) -> int:
    """Entry point; see run_command() for the exit code."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else None
    if name == "serve":
        from ._native.programs import exec_program

        exec_program("llama-server", words[1:])
    if name in COMMANDS:
        return importlib.import_module(f".{name.replace('-', '_')}", __package__).main(words[1:], f"ggml-ext {name}")
    return run_without_command(words)


if __name__ == "__main__":
    sys.exit(main())
