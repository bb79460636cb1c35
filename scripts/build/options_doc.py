#!/usr/bin/env python3
"""Writes what follows from the options of the commands: docs/reference/options.md and the keywords of the Python API.

    options_doc.py            writes the files
    options_doc.py --check    exit code 1 if one is not up to date
"""
from __future__ import annotations

import argparse
import inspect as python_inspect
import sys
from collections.abc import Callable
from pathlib import Path

from ggml_ext import api, bench, evaluate, export, gpu_report, inspect, quantize, scale_adapter, upload
from ggml_ext._base.option import Option, list_options
from ggml_ext._commands.evaluating import EvaluateOptions
from ggml_ext._commands.exporting import ExportOptions
from ggml_ext._commands.inspecting import InspectOptions
from ggml_ext._commands.options import QuantizeOptions
from ggml_ext._console.cli import Parser, add_common_options

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"quantize": quantize, "evaluate": evaluate, "bench": bench, "export": export, "scale-adapter": scale_adapter, "upload": upload, "inspect": inspect,
            "gpu-report": gpu_report}
FUNCTIONS: dict[Callable, type] = {
    api.quantize_model: QuantizeOptions, api.export_model: ExportOptions, api.evaluate_models: EvaluateOptions,
    api.inspect_model: InspectOptions,
}
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
KEYWORDS_HEAD = '''"""Generated from the options of the commands by scripts/build/options_doc.py; do not edit.

The keywords of the Python API, for editors and type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict, Union

AnyPath = Union[str, "os.PathLike[str]"]
'''


def common() -> argparse.ArgumentParser:
    """What all commands have."""
    parser = Parser(prog="all commands", description="", add_help=True)
    add_common_options(parser)
    return parser


def cell(text: str) -> str:
    return " ".join(text.split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


def row(action: argparse.Action) -> str:
    """The row of a flag or of a file."""
    names = [f"`{name}`" for name in action.option_strings] or [f"`{action.metavar}`"]
    value = "" if action.nargs == 0 or not action.option_strings else f" `{action.metavar}`".replace("|", "\\|")
    return f"| {', '.join(names)}{value} | {cell(action.help or '')} |"


def section(parser: argparse.ArgumentParser, left_out: set[str]) -> str:
    actions = [action for action in parser._actions if action.dest not in left_out]
    actions.sort(key=lambda action: bool(action.option_strings))  # files first
    epilog = [] if parser.epilog is None else ["", "```text", parser.epilog, "```"] if "\n" in parser.epilog else ["", parser.epilog]
    return "\n".join([f"## {parser.prog}", "", "| option | what it does |", "| --- | --- |", *map(row, actions), *epilog])


def options_page() -> str:
    shared = common()
    names = {action.dest for action in shared._actions}
    parsers = [module.build_parser(f"ggml-ext {name}") for name, module in COMMANDS.items()]
    sections = [section(parser, names) for parser in parsers] + [section(shared, set())]
    return "\n\n".join([HEAD.rstrip(), *sections]) + "\n"


def annotation(option: Option) -> str:
    """The type of a keyword."""
    name = "AnyPath" if option.type is Path else option.type.__name__ + " | float" * option.is_number
    return f"{name} | Sequence[{name}]" if option.repeats else name + " | None" * option.is_optional


def keywords(functions: dict[Callable, type] = FUNCTIONS) -> str:
    """The module with a TypedDict for each function of the API: its options but for the parameters that it names."""
    parts = [KEYWORDS_HEAD]
    for function, kind in functions.items():
        named = python_inspect.signature(function).parameters
        fields = [f"    {o.keyword}: {annotation(o)}" for o in list_options(kind) if o.keyword not in named]
        head = f'class {kind.__name__.replace("Options", "Keywords")}(TypedDict, total=False):\n    """Keywords of {function.__name__}()."""\n'
        parts.append("\n".join([head, *fields]) + "\n")
    return "\n\n".join(parts)


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__.strip(), file=sys.stderr)
        return 1
    texts = {ROOT / "docs/reference/options.md": options_page(), ROOT / "py/ggml_ext/_commands/keywords.py": keywords()}
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in sys.argv:
            print(f"error: {path.relative_to(ROOT)} is not up to date: run python scripts/build/options_doc.py", file=sys.stderr)
        else:
            path.write_text(texts[path], encoding="utf-8")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
