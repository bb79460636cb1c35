"""Options of the commands. A field of a dataclass defines an option; all else that shows, checks or records it is made from that field.

    @dataclass(frozen=True, kw_only=True)
    class BenchOptions:
        rounds: int = option(5, short="-r", metavar="N", minimum=1, help="rounds per model (default: 5)")

The field is the flag `-r, --rounds N`, the keyword `rounds` of the Python API, the check of both, words of command_line() and a row of
docs/reference/options.md. A field whose type is such a dataclass is a section: its options belong to the command too. Fields
without option() are no options.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from .encoding import to_argument
from .errors import UserError

Options = TypeVar("Options")

_DEFINITION = "option"  # key of a field's metadata
# by the type of an option: what the Python API accepts, and what to call it
_ACCEPTED: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((Integral,), "an integer"),
    float: ((Real,), "a number"),
    str: ((str, Real), "a text"),
    Path: ((str, os.PathLike), "a path"),
}


def option(default: Any = dataclasses.MISSING, **definition: Any) -> Any:
    """Define an option. Without a default it is required; `definition` has the attributes of Option from `help` on."""
    return dataclasses.field(default=default, metadata={_DEFINITION: definition})


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option as its field defines it.

    Attributes:
        field: the name in the dataclass.
        type: the type of one value: bool, int, float, str or Path. An optional bool also has a --no- flag.
        default: MISSING if the option is required.
        is_optional: None is a value.
        repeats: each use of the flag adds a value; a positional argument takes one or more.
        help: the text of --help, without a full stop, two lines at most.
        metavar: the name of the value in --help. The choices, where there are some, take its place.
        short: the one-letter flag.
        flag: the long flag, where it is not the field's name with dashes.
        choices: the values that are accepted.
        minimum: the smallest number that is accepted.
        is_positional: a file or word without a flag.
        is_number: a text whose keyword also takes a number.
        in_command: the option belongs to the command that a model card shows.
        record: the place in the record of options that decide the bytes of the output; None: it is not recorded.
        record_for: GGML types that the option is recorded for, default included; empty: it is recorded where it is set.
    """

    field: str
    type: type
    default: Any
    is_optional: bool
    repeats: bool
    help: str
    metavar: str | None = None
    short: str | None = None
    flag: str = ""
    choices: Sequence[Any] = ()
    minimum: int | None = None
    is_positional: bool = False
    is_number: bool = False
    in_command: bool = True
    record: int | None = None
    record_for: Collection[str] = ()

    @property
    def long(self) -> str:
        return self.flag or "--" + self.field.replace("_", "-")

    @property
    def keyword(self) -> str:
        """The name in the Python API and in argparse's namespace."""
        return self.long.removeprefix("--").replace("-", "_")

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    def check(self, value: Any) -> None:
        """Raise UserError for a value outside of the choices or below the minimum."""
        for one in value if self.repeats else [] if value is None else [value]:
            if self.choices and one not in self.choices:
                separator = " or " if len(self.choices) == 2 else ", "
                raise UserError(f"{self.long}: got {one!r}, must be {separator.join(map(str, self.choices))}")
            if self.minimum is not None and one < self.minimum:
                raise UserError(f"{self.long}: got {one}, must be at least {self.minimum}")

    def convert(self, value: Any) -> Any:
        """Turn the value of a keyword into what the commands get; one value stands for a list of one. Raise TypeError for other types."""
        if value is None and self.is_optional:
            return None
        if self.repeats:
            is_one = isinstance(value, (str, os.PathLike)) or not isinstance(value, Iterable)
            return tuple(map(self._convert_one, [value] if is_one else value))
        return self._convert_one(value)

    def _convert_one(self, value: Any) -> Any:
        accepted, name = _ACCEPTED[self.type]
        if not isinstance(value, accepted) or isinstance(value, bool) != (self.type is bool):
            raise TypeError(f"{self.keyword}: got {value!r}, must be {name}{' or None' if self.is_optional else ''}")
        return self.type(value)

    def words(self, value: Any) -> list[str]:
        """The words of a command line for a value; nothing for the default. Paths lose their directories."""
        if value == self.default or value is None:
            return []
        words = []
        for one in value if self.repeats else [value]:
            text = to_argument(one.name) if isinstance(one, Path) else str(one)
            words += [text] if self.is_positional else [self.long] if one is True else [self.long, text]
        return words

    def records(self, value: Any, types: Collection[str]) -> list[str]:
        """The words of the record for a value. types: names of the GGML types in the output."""
        if not value or (self.record_for and not set(self.record_for) & set(types)):
            return []
        name = self.long.removeprefix("--")
        if value is True:
            return [name]
        return [f"{name}={one:g}" if isinstance(one, float) else f"{name}={one}" for one in (value if self.repeats else [value])]


def list_options(kind: type) -> Iterator[Option]:
    """The options of a dataclass, those of its sections where the section stands."""
    for field, hint in _fields(kind):
        if dataclasses.is_dataclass(hint):
            yield from list_options(typing.cast(type, hint))
        elif _DEFINITION in field.metadata:
            yield _parse_field(field, hint)


def _fields(kind: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field, hints[field.name]


def _parse_field(field: dataclasses.Field, hint: Any) -> Option:
    is_optional = type(None) in typing.get_args(hint)
    if is_optional:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    repeats = typing.get_origin(hint) is not None
    if repeats:
        (hint,) = typing.get_args(hint)
    return Option(
        field=field.name, type=hint, default=field.default, is_optional=is_optional, repeats=repeats, **field.metadata[_DEFINITION]
    )


def build_options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Fill a dataclass and its sections from values by keyword; the others have their defaults. Raise UserError for a bad value."""
    arguments: dict[str, Any] = {}
    for field, hint in _fields(kind):
        if dataclasses.is_dataclass(hint):
            arguments[field.name] = build_options(typing.cast(type, hint), values)
        elif _DEFINITION in field.metadata and (definition := _parse_field(field, hint)).keyword in values:
            value = values[definition.keyword]
            arguments[field.name] = tuple(value) if definition.repeats else value
            definition.check(value)
    return kind(**arguments)


def check_keywords(kind: type[Options], keywords: Mapping[str, Any]) -> Options:
    """Make the options of a command from keywords of the Python API.

    Raises:
        TypeError: a keyword is no option, or its value has another type than the option.
        UserError: a value is not accepted.
    """
    known = {definition.keyword: definition for definition in list_options(kind)}
    if unknown := [name for name in keywords if name not in known]:
        raise TypeError(f"{unknown[0]!r} is no option: known are {', '.join(known)}")
    return build_options(kind, {name: known[name].convert(value) for name, value in keywords.items()})


def list_values(options: Any) -> Iterator[tuple[Option, Any]]:
    """The options of an object, with their values."""
    for field, hint in _fields(type(options)):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(hint):
            yield from list_values(value)
        elif _DEFINITION in field.metadata:
            yield _parse_field(field, hint), value


def command_line(program: Sequence[str], options: Any) -> str:
    """The command that makes a file again, for a shell. Options that do not change the file are left out."""
    values = [(definition, value) for definition, value in list_values(options) if definition.in_command]
    values.sort(key=lambda pair: not pair[0].is_positional)
    return shlex.join([*program, *(word for definition, value in values for word in definition.words(value))])


def describe_record(options: Any, types: Collection[str]) -> str:
    """The options that decide the bytes of the output, in the order of `record`. types: names of the GGML types in it."""
    values = [(definition, value) for definition, value in list_values(options) if definition.record is not None]
    values.sort(key=lambda pair: typing.cast(int, pair[0].record))
    return " ".join(word for definition, value in values for word in definition.records(value, types))
