"""A finished file to the Hugging Face hub: ggml-ext upload FILE ORG/NAME, or python -m ggml_ext.upload"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._commands.uploading import UploadOptions, upload
from ._console.cli import Parser, add_common_options, print_text, run_command
from ._console.program import options_of
from ._console.terminal import Terminal

WAY_OUT = "run it with its output open"


def build_parser(prog: str = "ggml-ext-upload") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Uploads a file of quantize or export, of a split one all parts, with its card to the Hugging Face hub. The repository is "
        "made if there is none. Files that are whole there are not sent again.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="GGUF model, of a split one any part")
    add("repo", metavar="ORG/NAME", help="repository of the hub")
    add("--model-card", metavar="FILE", type=Path, help="becomes its README.md; quantize and export --model-card write such cards")
    add("--quality", metavar="FILE", type=Path, help="what evaluate --json printed, for a table in the card")
    add("--private", action="store_true", help="make a private repository")
    add("--revision", metavar="NAME", help="branch to upload to; default: main")
    add("--hf-token", metavar="TOKEN", help="access token that may write; default: HF_TOKEN, or that of the client's login")
    add("-q", "--quiet", action="store_true", help="print errors and warnings only")
    add_common_options(parser)
    return parser


def main(argv: list[str] | None = None, prog: str = "ggml-ext-upload") -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace()

    def run() -> None:
        build_parser(prog).parse_intermixed_args(argv, args)
        address = upload(options_of(UploadOptions, args), Terminal(WAY_OUT, quiet=args.quiet))
        print_text(address, WAY_OUT)

    return run_command(run, lambda: "files that are whole on the hub stay there", WAY_OUT, args=args)


if __name__ == "__main__":
    sys.exit(main())
