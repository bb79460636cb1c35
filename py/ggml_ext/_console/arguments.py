"""Build argument parsers from options, and options from parsed arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, TypeVar

from .._base.option import Option, build_options, list_options
from .cli import Parser, add_common_options

Options = TypeVar("Options")


def build_parser(prog: str, *kinds: type, **texts: Any) -> argparse.ArgumentParser:
    """Build a command's parser. kinds: dataclasses of options, in the order of --help; texts: description and epilog."""
    parser = Parser(prog=prog, **texts)
    for kind in kinds:
        add_arguments(parser, kind)
    add_common_options(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the options of a dataclass and of its sections to a parser."""
    for option in list_options(kind):
        names = [option.keyword] if option.is_positional else [*([option.short] if option.short else []), option.long]
        parser.add_argument(*names, help=option.help.replace("%", "%%"), **_make_arguments(option))


def _make_arguments(option: Option) -> dict[str, Any]:
    """Make the keyword arguments of add_argument(), without help. build_options() checks choices."""
    if option.type is bool:
        action = argparse.BooleanOptionalAction if option.is_optional else "store_true"
        return {"action": action, "default": option.default}
    arguments: dict[str, Any] = {"metavar": f"{{{','.join(map(str, option.choices))}}}" if option.choices else option.metavar}
    if option.type in (int, float, Path):
        arguments["type"] = option.type
    if option.is_positional:
        return arguments | ({"nargs": "+"} if option.repeats else {} if option.is_required else {"nargs": "?"})
    if option.repeats:
        return arguments | {"action": "append", "default": []}
    return arguments | ({"required": True} if option.is_required else {"default": option.default})


def from_namespace(kind: type[Options], args: argparse.Namespace) -> Options:
    """Make options from a parsed command line. Raise UserError for an invalid value."""
    return build_options(kind, vars(args))
