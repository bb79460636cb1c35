"""Paths that a file to be written must not take: files that are read, kept for the next run, or unfinished."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._base.errors import UserError
from .._base.files import partial_path
from .cache_names import choice_cache_name
from .split import PART_NAME

# Names of partial_path(), of its journal, of Part.replaced and of write_atomically().
UNFINISHED = r"\..+\.(partial|partial\.json|replaced|\d+\.part)"
OTHER_NAME = "name another file"


def journal_of(path: Path) -> Path:
    """Return the name of the journal of OUT."""
    return partial_path(path).with_name(partial_path(path).name + ".json")


def is_same_file(a: Path, b: Path) -> bool:
    """Whether both paths name one file, through links and other spellings too, whether or not it exists."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


@dataclass(frozen=True)
class ReservedPaths:
    """The paths that a run reads, keeps and writes."""

    inputs: Mapping[Path, str]  # files that are read, and what messages call them
    stem: str | None = None  # of the model whose results are kept next to OUT; None if nothing is kept
    is_split: bool = False  # parts with names made from OUT take its place
    out: Path | None = None  # OUT with links resolved; None if it is not written
    written: Mapping[Path, str] = field(default_factory=dict)  # other files that are written, links resolved, by flag

    def describe_input(self, path: Path) -> str | None:
        """Return what messages call an input file; None for another file."""
        return next((what for source, what in self.inputs.items() if is_same_file(source, path)), None)

    def describe_kept(self, path: Path) -> str | None:
        """Return what messages call a file that a run keeps next to OUT for the next run; None for another file."""
        if self.stem is None or self.out is None or path.parent != self.out.parent:
            return None
        if path.name == choice_cache_name(self.stem):
            return "what is measured for a target"
        imatrix = re.escape(self.stem) + r"\.imatrix(\.layers-\d+-\d+)?\.(gguf|json)"
        return "the imatrix" if re.fullmatch(imatrix, path.name) else None

    def is_part(self, path: Path) -> bool:
        """Whether a part of OUT may get that name."""
        if not self.is_split or self.out is None or path.parent != self.out.parent:
            return False
        match = PART_NAME.fullmatch(path.name)
        return match is not None and match[1] == self.out.name.removesuffix(".gguf")

    def check(self, flag: str, spelling: Path, path: Path, hint: str = OTHER_NAME) -> None:
        """Raise UserError if a file to be written has a reserved name. spelling: the user's; path: with links resolved."""
        what = self.describe_input(path) or self.written.get(path) or ("OUT" if path == self.out and flag != "OUT" else None)
        if what:
            raise UserError(f"{flag}: {spelling} is the same file as {what}: {hint}")
        if self.is_part(path):
            raise UserError(f"{flag}: {spelling} is the same file as OUT, or has a name of its parts: {hint}")
        if re.fullmatch(UNFINISHED, path.name):
            raise UserError(f"{flag}: {spelling}: such names are those of incomplete files: {hint}")
        if what := self.describe_kept(path):
            raise UserError(f"{flag}: {spelling} is where {what} of {self.stem} is kept: {hint}")


def reserve_output(paths: ReservedPaths, output: Path | None, force: bool) -> ReservedPaths:
    """Reserve OUT; UserError if it may not be written."""
    if output is None:
        raise UserError("OUT is missing: name the file to write, or pass --dry-run")
    path, hint = Path(os.path.realpath(output)), "choose another name"
    try:
        exists = output.exists()  # not its resolved name, which a pipe behind /dev/stdout lacks
    except OSError as e:
        raise UserError(f"OUT: {e.strerror}: {output}") from e
    if not path.parent.is_dir():
        raise UserError(f"OUT: the directory {path.parent} does not exist: create it first")
    if path.is_dir():
        raise UserError(f"OUT: {output} is a directory: name a file in it")
    paths = replace(paths, out=path)
    paths.check("OUT", output, path, hint)
    for unfinished in (partial_path(path), journal_of(path)):
        if what := paths.describe_input(unfinished):
            raise UserError(f"OUT: {what} is {unfinished}, which {output} is until it is complete: {hint}")
    if exists and not output.is_file():
        raise UserError(f"OUT: {output} is not a regular file: name one")
    if exists and not (force or paths.is_split):
        raise UserError(f"OUT: {output} exists: {hint} or pass --force to replace it")
    return paths


def reserve_file(flag: str, spelling: Path, paths: ReservedPaths, force: bool) -> ReservedPaths:
    """Reserve the file of a flag; UserError if it may not be written. It need not exist."""
    path = Path(os.path.realpath(spelling))
    try:
        exists = spelling.exists()
    except OSError as e:  # of a name that is too long
        raise UserError(f"{flag}: {spelling}: {e.strerror}: {OTHER_NAME}") from e
    if not path.parent.is_dir():
        raise UserError(f"{flag}: the directory {path.parent} does not exist: create it first")
    paths.check(flag, spelling, path)
    if exists and not spelling.is_file():
        raise UserError(f"{flag}: {spelling} is not a regular file: {OTHER_NAME}")
    if exists and not force:
        raise UserError(f"{flag}: {spelling} exists: {OTHER_NAME} or pass --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}: the directory {path.parent} may not be written: {OTHER_NAME}")
    return replace(paths, written={**paths.written, path: flag})
