"""The file that a run makes, or the parts of a split one: locked, and written beside its place until it is whole.

Beside model.gguf lie meanwhile .model.gguf.partial, which becomes it, and .model.gguf.partial.json, the journal: a line of JSON
about what the bytes depend on, then one for each finished tensor with the SHA-256 of its data. The run that writes them holds a
lock (flock) on the journal, which ends with the process however that ends. A run that was stopped or failed at a tensor leaves both if
one was finished, and the next one with the same input, options and version goes on after it. They are removed where what they hold is
wrong: the input changed, or --verify found other data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .._base.errors import UserError
from .._base.file_reader import FileChanged
from .._base.files import (
    LOCK_ATTEMPTS,
    NO_SPACE,
    allocated_bytes,
    free_space,
    is_plain_file,
    move_into_place,
    open_file,
    partial_path,
    sync,
)
from .._base.json import is_number, parse_json
from .._base.signals import ignore_signals
from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._formats.gguf_file import pad
from .parts import Part, journal_of, keep_mode, split_parts, take_back

PIECE = 4 * MIB  # read at once
JOURNAL_FORMAT = 2


class Unfinished(UserError):
    """An error of the end, after which the same command has little to do."""


@dataclass(frozen=True)
class Finished:
    """A line of the journal: a tensor whose data are in the partial file."""

    tensor: int
    type: str  # which --fallback-above may have changed
    n_bytes: int  # without padding
    sha256: str
    seconds: float
    accuracy: Accuracy
    warnings: list[str]  # that came up while it was encoded

    @classmethod
    def parse(cls, line: bytes) -> Finished:
        """ValueError, TypeError or KeyError for what is no such line."""
        found = cls(**parse_json(line))
        found = replace(found, accuracy=Accuracy(**found.accuracy))
        of_kinds = [(found.tensor, int), (found.type, str), (found.n_bytes, int), (found.sha256, str), (found.warnings, list)]
        numbers = [found.seconds, *(v for v in asdict(found.accuracy).values() if type(v) is not bool)]
        if not all(isinstance(value, kind) for value, kind in [*of_kinds, *((w, str) for w in found.warnings)]):
            raise TypeError("a value of another kind")
        if not all(map(is_number, numbers)) or found.seconds < 0:
            raise ValueError("a number that was not measured")
        return found


class Output:
    """What a run writes. As a context it holds the lock, and decides at its end what stays of partial files.

    Order of calls: plan(), begin(), for each tensor start(), write() and finish(), then complete() and publish().
    """

    def __init__(self, path: Path, force: bool, is_split: bool = False):
        """path: OUT with links resolved; force: it may exist; is_split: parts with names made from it take its place."""
        self.path, self.force, self.is_split = path, force, is_split
        self.journal_path = journal_of(path)
        self.parts: list[Part] = []
        self.finished: list[Finished] = []
        self.n_bytes = 0
        self._alignment, self._sizes, self._headers, self._possible = 1, [], [], []
        self._journal: BinaryIO | None = None
        self._file: BinaryIO | None = None
        self._part = -1  # number of the part that is open
        self._begun = self._is_whole = False
        self._hash, self._written = hashlib.sha256(), 0

    # --- the lock ---

    def __enter__(self) -> Output:
        with self._errors():
            self._lock()
        try:
            self.check_absent()  # it may have been written between the first look and the lock
        except UserError:
            self._close()
            raise
        return self

    def _lock(self) -> None:
        for _ in range(LOCK_ATTEMPTS):
            self._journal = open_file(self.journal_path)
            if fcntl is not None:
                try:
                    fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._journal.close()
                    raise UserError(f"OUT: another run is writing {self.path}: wait for its end, or name another file") from None
                except OSError:
                    return  # a file system without locks
            # the run that held the lock may have removed the file in the meantime
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._journal.fileno()), os.lstat(self.journal_path)):
                    return
            self._journal.close()
        raise UserError(f"OUT: cannot lock {self.journal_path}, which others make and remove all the time: name another file")

    def __exit__(self, kind, error, traceback) -> None:
        stays = False
        if error is not None and self._begun:
            was_stopped = not isinstance(error, Exception) or isinstance(error, (Unfinished, MemoryError, BrokenPipeError))
            is_sound = not self._is_whole and isinstance(error, UserError) and not isinstance(error, FileChanged)
            stays = (was_stopped or is_sound) and bool(self.finished)
            if stays:
                error.kept = self.describe_rest()
        elif not self._begun:  # what an earlier run left is not ours to judge yet
            stays = self._journal is not None and os.fstat(self._journal.fileno()).st_size > 0
        if not stays:
            self._remove([part.partial for part in self.parts] if self._begun else [])
        self._close()

    def _remove(self, partials: Sequence[Path]) -> None:
        for path in (*partials, self.journal_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _close(self) -> None:
        for f in (self._file, self._journal):
            if f is not None:
                with contextlib.suppress(OSError):
                    f.close()  # which writes what a buffer holds
        self._file = self._journal = None

    def describe_rest(self) -> str:
        """For the message of a run that was stopped."""
        n_files = len({self._part_of(f.tensor) for f in self.finished})
        more = f" and {n_files - 1} more" if n_files > 1 else ""
        return (
            f"the same command goes on after {len(self.finished)} of {len(self._sizes)} tensors, which are in "
            f"{self.parts[0].partial}{more}"
        )

    # --- before the first tensor ---

    def check_absent(self) -> None:
        """UserError if one of the files exists and may not be replaced."""
        for path in [part.path for part in self.parts] or ([] if self.is_split else [self.path]):
            if not self.force and os.path.lexists(path):
                raise UserError(f"OUT: {path} exists: choose another name or pass --force to replace it")

    def plan(
        self, sizes: Sequence[int], header_bytes: int, alignment: int, max_bytes: int | None, reads: Callable[[Path], str | None],
        largest: Sequence[int] | None = None,
    ) -> None:
        """Decides the parts. sizes: bytes of the tensors, header_bytes: about those of the metadata; reads: says what a file
        that is read is called; largest: bytes that tensors may get, where those are more, none of which makes a part too large.

        UserError if one of the files may not be written, or if there is no room for all.
        """
        self._sizes, self._alignment = list(sizes), alignment
        padded = [pad(n, alignment) for n in sizes]
        self.parts = split_parts(self.path, [pad(n, alignment) for n in largest or sizes], max_bytes)
        self.check_absent()
        for part in self.parts:
            if part.path.is_dir():
                raise UserError(f"OUT: {part.path} is a directory: choose another name")
            for path in (part.path, part.partial, part.replaced):
                if what := reads(path):
                    raise UserError(f"OUT: {path} is the same file as {what}: choose another name")
        self.n_bytes = sum(padded) + header_bytes
        with self._errors():
            left = {p.partial for p in self.parts} | set(self._left())  # written again, or to be removed
            free = free_space(self.path.parent) + sum(map(allocated_bytes, left))
        if free < self.n_bytes:
            raise UserError(
                f"no space left on device: {self._needed()}, {self.path.parent} has {free / MIB:,.2f} MiB free; "
                "free some space or write to another disk"
            )

    def _needed(self) -> str:
        return f"{self.path} needs {self.n_bytes / MIB:,.2f} MiB"

    def _part_of(self, tensor: int) -> int:
        return next(n for n, part in enumerate(self.parts) if tensor < part.last)

    def _lines(self) -> list[bytes]:
        """Whole lines of the journal."""
        self._journal.seek(0)
        return [line for line in self._journal.read().splitlines(keepends=True) if line.endswith(b"\n")]

    def _head(self) -> dict | None:
        """The journal's first line; None for a new journal, {} for one that cannot be read."""
        lines = self._lines()
        if not lines:
            return None if not os.fstat(self._journal.fileno()).st_size else {}
        try:
            head = parse_json(lines[0])
            good = head["format"] == JOURNAL_FORMAT and isinstance(head["made_from"], dict)
            return head if good and all(isinstance(f, str) for f in head["files"]) else {}
        except (ValueError, TypeError, KeyError):
            return {}

    def _left(self) -> list[Path]:
        """Partial files of an earlier run on OUT that are there. Nothing else, whatever the journal says."""
        names = [n for n in (self._head() or {}).get("files", []) if re.fullmatch(r"\.[^/\\]+\.partial", n)]
        found = dict.fromkeys([*map(self.path.with_name, names), partial_path(self.path)])
        return [p for p in found if is_plain_file(p)]

    def begin(
        self, made_from: dict, headers: Sequence[bytes], possible: Sequence[Mapping[str, int]], say: Callable[[str], None]
    ) -> None:
        """Finds what an earlier run left, and checks or removes it. made_from: what the bytes depend on, by name, for JSON.
        headers: what stands before the data of each part; complete() gets the final ones, of the same lengths. possible: of each
        tensor the types that it may have, and its bytes in them.

        The tensors that need not be done again are in `finished`.
        """
        self._headers, self._possible = [len(h) for h in headers], possible
        with self._errors():
            head, left = self._head(), self._left()
            self._begun = True
            files = [part.partial.name for part in self.parts]
            if head and head["files"] == files and head["made_from"] == made_from:
                self._resume()
                if self.finished:
                    say(f"an earlier run was stopped: going on after {len(self.finished)} of {len(self._sizes)} tensors")
                    return
                say("an earlier run was stopped, and what it left is incomplete or changed: started anew")
            elif head is not None or left:
                changed = [key for key in made_from if made_from[key] != head["made_from"].get(key)] if head else []
                why = f"not of the same {', '.join(changed)}" if changed else "of which too little is known"
                what = ", ".join(p.name for p in left) or self.journal_path.name
                say(f"an earlier run was stopped: started anew, what it left is {why} and was removed: {what}")
            self._close_part()
            for path in {*left, *(p.partial for p in self.parts)}:
                path.unlink(missing_ok=True)  # not written over: it may be a file that has its name already
            self._journal.seek(0)
            self._journal.truncate()
            self._note({"format": JOURNAL_FORMAT, "made_from": made_from, "files": files})

    def _resume(self) -> None:
        """Takes over finished tensors as long as their data are what the journal says; cuts off what comes after."""
        lines = self._lines()
        n_bytes = len(lines[0])
        for i, line in enumerate(lines[1:]):
            try:
                found = Finished.parse(line)
            except (ValueError, TypeError, KeyError):
                break
            is_next = found.tensor == i < len(self._sizes)
            if not is_next or found.n_bytes != self._possible[i].get(found.type) or not self._holds(found):
                break
            self.finished.append(found)
            n_bytes += len(line)
        self._journal.seek(n_bytes)
        self._journal.truncate()

    def _holds(self, found: Finished) -> bool:
        """True if the partial file has the data of a tensor."""
        self._open_part(self._part_of(found.tensor))
        self._file.seek(self._end_of(self._part))
        digest, left = hashlib.sha256(), found.n_bytes
        while left and (piece := self._file.read(min(left, PIECE))):
            digest.update(piece)
            left -= len(piece)
        return not left and digest.hexdigest() == found.sha256

    # --- tensors ---

    def data_of(self, tensor: int) -> np.ndarray | None:
        """uint8 data of a finished tensor, or None."""
        if tensor >= len(self.finished):
            return None
        n, found = self._part_of(tensor), self.finished[tensor]
        with self._errors(), open(self.parts[n].partial, "rb") as f:
            f.seek(self._offset(n, tensor))
            return np.frombuffer(f.read(found.n_bytes), np.uint8)

    def _open_part(self, n: int) -> None:
        if n == self._part:
            return
        if self._file is not None:
            sync(self._file)
        self._close_part()
        self._part = n
        self._file = open_file(self.parts[n].partial)

    def _close_part(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._part = None, -1

    def _end_of(self, n: int) -> int:
        """Where the finished data of a part end."""
        return self._offset(n, self.parts[n].last)

    def _offset(self, n: int, tensor: int) -> int:
        """Where the finished data of a part's tensors before this one end."""
        return self._headers[n] + sum(pad(f.n_bytes, self._alignment) for f in self.finished[self.parts[n].first : tensor])

    def start(self, tensor: int) -> None:
        """What is written from here on is this tensor. It may be started again."""
        assert tensor == len(self.finished)
        with self._errors():
            self._open_part(self._part_of(tensor))
            self._file.seek(self._end_of(self._part))
            self._hash, self._written = hashlib.sha256(), 0

    def write(self, data) -> None:
        """Bytes or a contiguous array."""
        with self._errors():
            self._file.write(data)
        self._hash.update(data)
        self._written += memoryview(data).nbytes

    def finish(self, type_name: str, accuracy: Accuracy, seconds: float, warnings: list[str]) -> None:
        """The tensor that was started is whole."""
        with self._errors():
            self._file.write(bytes(pad(self._written, self._alignment) - self._written))
            self._file.flush()  # data first: the journal must not say more than there is
            done = Finished(len(self.finished), type_name, self._written, self._hash.hexdigest(), seconds, accuracy, warnings)
            self._note(asdict(done))
            self.finished.append(done)

    def _note(self, line: dict) -> None:
        self._journal.write(json.dumps(line).encode() + b"\n")
        self._journal.flush()

    # --- the end ---

    def complete(self, headers: Sequence[bytes]) -> None:
        """Writes all headers; the partial files are whole then."""
        assert len(self.finished) == len(self._sizes) and [len(h) for h in headers] == self._headers
        with self._errors():
            for n, header in enumerate(headers):
                self._open_part(n)
                self._file.seek(0)
                self._file.write(header)
                self._file.truncate(self._end_of(n))
            sync(self._file)
        self._is_whole = True

    def publish(self) -> None:
        """Gives the files their names, all or none. Unfinished if one cannot get its own, or if one of them appeared in the
        meantime: without force none is replaced."""
        ignore_signals()  # from here on the files are written, and saying otherwise would be wrong
        with self._errors():
            self._close_part()
        named, aside = [], []
        try:
            for part in self.parts:
                if self.force:
                    keep_mode(part)
                    aside += [part] if self._set_aside(part) else []
                move_into_place(part.partial, part.path, self.force)  # the other name of a link goes with the journal
                named.append(part)
        except OSError as e:
            for done in named:
                with contextlib.suppress(OSError):
                    take_back(done)
            for done in aside:
                with contextlib.suppress(OSError):
                    os.replace(done.replaced, done.path)
            raise Unfinished(f"OUT: {part.path} {self._not_named(e)}") from e
        for part in aside:
            with contextlib.suppress(OSError):
                part.replaced.unlink()

    def _set_aside(self, part: Part) -> bool:
        """True if there is a file that a part replaces, which has another name now. The replacement of one file needs none."""
        if len(self.parts) == 1 or not os.path.lexists(part.path) or part.path.is_dir():
            return False
        os.replace(part.path, part.replaced)
        return True

    def _not_named(self, error: OSError) -> str:
        if isinstance(error, FileExistsError) and not self.force:
            return "appeared while it was made, and was left as it is: move it away, or pass --force to replace it"
        return f"could not be put in its place: {error.strerror}; make way for it"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the file system in one line."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as e:
            if e.errno in NO_SPACE:
                raise Unfinished(
                    f"no space left on device ({e.strerror}): {self._needed()}; free some space or write to another disk"
                ) from e
            raise UserError(f"cannot write {self.path}: {e.strerror}; choose a folder that may be written") from e


