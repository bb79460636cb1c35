"""Upload a finished file to the Hugging Face hub: ggml-ext upload FILE ORG/NAME"""

from __future__ import annotations

import argparse
import sys

from ._commands.uploading import UploadOptions, upload
from ._console import arguments
from ._console.cli import print_text, run_command
from ._console.terminal import QuietOptions, Terminal


def build_parser(prog: str = "ggml-ext upload") -> argparse.ArgumentParser:
    return arguments.build_parser(
        prog, UploadOptions, QuietOptions,
        description="Upload a model that quantize or export wrote, with its model card, to the Hugging Face hub. A missing repository is "
        "created. Files that are complete on the hub are not sent again.",
    )


def main(argv: list[str] | None = None, prog: str = "ggml-ext upload") -> int:
    """Run the command and return its exit code, as run_program() documents it."""
    args = argparse.Namespace()

    def run() -> None:
        build_parser(prog).parse_intermixed_args(argv, args)
        terminal = Terminal(quiet=arguments.from_namespace(QuietOptions, args).quiet)
        print_text(upload(arguments.from_namespace(UploadOptions, args), terminal))

    return run_command(run, lambda: "files that are complete on the hub stay there", args=args)


if __name__ == "__main__":
    sys.exit(main())
