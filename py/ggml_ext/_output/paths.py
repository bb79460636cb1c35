"""Names of files: those that a run keeps beside OUT, and that no file which is written takes the place of one that is read, kept or
unfinished."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._base.errors import UserError
from .._base.files import partial_path
from .._formats.cache_names import choice_cache_name
from .._formats.split import PART_NAME
from .parts import UNFINISHED, journal_of

WAY_OUT = "name another file"


def same_file(a: Path, b: Path) -> bool:
    """True if both name one file, also through links and other spellings, or would if it were there."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


@dataclass(frozen=True)
class Taken:
    """Names that are taken for a file that is written. read: files that are read, and what each is called; stem: of the model, whose
    results are kept beside OUT, None where nothing is kept; out: OUT with links resolved, None where it is not written; written: what
    else is, with links resolved, by flag."""

    read: Mapping[Path, str]
    stem: str | None = None
    is_split: bool = False  # OUT is, and parts with names made from it take its place
    out: Path | None = None
    written: Mapping[Path, str] = field(default_factory=dict)

    def reads(self, path: Path) -> str | None:
        """What a file that is read is called, None for another."""
        return next((what for source, what in self.read.items() if same_file(source, path)), None)

    def keeps(self, path: Path) -> str | None:
        """What a run keeps beside OUT under that name."""
        if self.stem is None or self.out is None or path.parent != self.out.parent:
            return None
        if path.name == choice_cache_name(self.stem):
            return "what is measured for a target"
        imatrix = re.escape(self.stem) + r"\.imatrix(\.layers-\d+-\d+)?\.(gguf|json)"
        return "the importance matrix" if re.fullmatch(imatrix, path.name) else None

    def is_part(self, path: Path) -> bool:
        """True for what may be the name of a part of OUT."""
        found = PART_NAME.fullmatch(path.name) if self.is_split and path.parent == self.out.parent else None
        return found is not None and found[1] == self.out.name.removesuffix(".gguf")

    def check(self, flag: str, given: Path, path: Path, way_out: str = WAY_OUT) -> None:
        """UserError if a file to be written has a name that is taken. given: as the user spelled it; path: with links resolved."""
        what = self.reads(path) or self.written.get(path) or ("OUT" if path == self.out and flag != "OUT" else None)
        if what:
            raise UserError(f"{flag}: {given} is the same file as {what}: {way_out}")
        if self.out is not None and self.is_part(path):
            raise UserError(f"{flag}: {given} is the same file as OUT, or has a name of its parts: {way_out}")
        if re.fullmatch(UNFINISHED, path.name):
            raise UserError(f"{flag}: {given}: such names are those of files that are not yet whole: {way_out}")
        if what := self.keeps(path):
            raise UserError(f"{flag}: {given} is where {what} of {self.stem} is kept: {way_out}")


def check_output(taken: Taken, output: Path | None, force: bool) -> Taken:
    """What is taken with OUT, if it may be written; UserError otherwise. taken: without it."""
    if output is None:
        raise UserError("OUT is missing: name the file to write, or pass --dry-run")
    path, way_out = Path(os.path.realpath(output)), "choose another name"
    try:
        is_there = output.exists()  # not its resolved name, which a pipe behind /dev/stdout lacks
    except OSError as e:
        raise UserError(f"OUT: {e.strerror}: {output}") from e
    if not path.parent.is_dir():
        raise UserError(f"OUT: the folder {path.parent} does not exist: create it first")
    if path.is_dir():
        raise UserError(f"OUT: {output} is a directory: name a file in it")
    taken = replace(taken, out=path)
    taken.check("OUT", output, path, way_out)
    for unfinished in (partial_path(path), journal_of(path)):
        if what := taken.reads(unfinished):
            raise UserError(f"OUT: {what} is {unfinished}, which {output} is until it is whole: {way_out}")
    if is_there and not output.is_file():
        raise UserError(f"OUT: {output} is not a regular file: name one")
    if is_there and not (force or taken.is_split):
        raise UserError(f"OUT: {output} exists: {way_out} or pass --force to replace it")
    return taken


def check_beside(flag: str, given: Path, taken: Taken, force: bool) -> Taken:
    """What is taken with the file of a flag too, if it may be written; UserError otherwise. It may be missing."""
    path = Path(os.path.realpath(given))
    try:
        is_there = given.exists()
    except OSError as e:  # of a name that is too long
        raise UserError(f"{flag}: {given}: {e.strerror}: {WAY_OUT}") from e
    if not path.parent.is_dir():
        raise UserError(f"{flag}: the folder {path.parent} does not exist: create it first")
    taken.check(flag, given, path)
    if is_there and not given.is_file():
        raise UserError(f"{flag}: {given} is not a regular file: {WAY_OUT}")
    if is_there and not force:
        raise UserError(f"{flag}: {given} exists: {WAY_OUT} or pass --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}: the folder {path.parent} may not be written: {WAY_OUT}")
    return replace(taken, written={**taken.written, path: flag})
