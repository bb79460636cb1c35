#!/usr/bin/env python3
"""Writes docs/reference/options.md: every flag of the commands, from their parsers.

    options_doc.py            writes the file
    options_doc.py --check    exit code 1 if it is not up to date
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ggml_ext import bench, evaluate, export, inspect, upload
from ggml_ext._console import options
from ggml_ext._console.cli import Parser, add_common_options

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "reference" / "options.md"
HEAD = """# Options

Every flag of the commands. This page is made from the commands themselves by `scripts/build/options_doc.py`.

`ggml-ext quantize`, `python -m ggml_ext quantize` and `python -m ggml_ext.quantize` are the same command. The same holds for the other commands, whose
modules have `_` for `-`. `ggml-ext serve` is llama-server.

A value that begins with a dash is written `--report=-out.json`; a file whose name begins with a dash as `./-in.gguf`, or after `--`.
Besides the options of all commands, `new-metadata` and `set-metadata` take those of gguf-new-metadata and gguf-set-metadata, and `libdir` has none.
gguf-dump shows the metadata of files with ggml-ext types when the package is imported first:

    python -c "import ggml_ext; from gguf.scripts.gguf_dump import main; main()" FILE

An error is one line that says what to do, with exit code 1. A line that begins with "unexpected" is a bug: `--debug` shows where it came from.
"""


def common() -> argparse.ArgumentParser:
    """What all commands have."""
    parser = Parser(prog="all commands", description="", add_help=True)
    add_common_options(parser)
    return parser


def cell(text: str) -> str:
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


def section(parser: argparse.ArgumentParser, left_out: set[str]) -> str:
    rows = []
    for action in parser._actions:
        if action.dest in left_out:
            continue
        names = [f"`{name}`" for name in action.option_strings] or [f"`{action.metavar}`"]
        value = "" if action.nargs == 0 or not action.option_strings else f" `{action.metavar or '{' + ','.join(action.choices) + '}'}`"
        rows.append(f"| {', '.join(names)}{value.replace('|', chr(92) + '|')} | {cell(action.help)} |")
    return "\n".join([f"## {parser.prog}", "", "| option | what it does |", "| --- | --- |", *rows])


def text() -> str:
    shared = common()
    names = {action.dest for action in shared._actions}
    modules = {"quantize": options, "evaluate": evaluate, "bench": bench, "export": export, "upload": upload, "inspect": inspect}
    parsers = [module.build_parser(f"ggml-ext {name}") for name, module in modules.items()]
    sections = [section(parser, names) for parser in parsers] + [section(shared, set())]
    return "\n\n".join([HEAD.rstrip(), *sections]) + "\n"


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__.strip(), file=sys.stderr)
        return 1
    if "--check" in sys.argv:
        if not OUT.is_file() or OUT.read_text() != text():
            print(f"error: {OUT.relative_to(ROOT)} is not up to date: run python scripts/build/options_doc.py", file=sys.stderr)
            return 1
        return 0
    OUT.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
