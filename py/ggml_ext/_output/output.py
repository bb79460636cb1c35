"""The output of a run: one file or the parts of a split one, locked, and written under hidden names until it is complete.

Until then .model.gguf.partial, which becomes model.gguf, is next to .model.gguf.partial.json, the journal: a line of JSON with what the bytes
depend on, then one for each finished tensor with the SHA-256 of its data. The run that writes them holds a lock (flock) on the journal, which
ends with the process. A run that is interrupted or fails at a tensor leaves both if a tensor was finished, and the next one with the same
input, options and version resumes. They are removed if what they hold is wrong: the input changed, or --verify read other data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from .._base.errors import UserError
from .._base.file_reader import FileChanged
from .._base.files import (
    LOCK_ATTEMPTS,
    NO_SPACE,
    allocated_bytes,
    check_free_space,
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
from .._formats.reserved_paths import journal_of
from .parts import Part, keep_mode, split_parts, take_back

PIECE = 4 * MIB  # read at once
JOURNAL_FORMAT = 2


class Unfinished(UserError):
    """An error at the end, after which the same command has little to do."""


@dataclass(frozen=True)
class FinishedTensor:
    """A line of the journal: a tensor whose data are in the partial file."""

    tensor: int
    type: str  # which --fallback-above may have changed
    n_bytes: int  # without padding
    sha256: str
    seconds: float
    accuracy: Accuracy
    warnings: list[str]  # that came up while it was encoded

    @classmethod
    def parse(cls, line: bytes) -> FinishedTensor:
        """Parse a line. ValueError, TypeError or KeyError if it is no such line."""
        values = parse_json(line)
        values["accuracy"] = Accuracy(**values["accuracy"])
        finished = cls(**values)
        kinds = [(finished.tensor, int), (finished.type, str), (finished.n_bytes, int), (finished.sha256, str), (finished.warnings, list)]
        numbers = [finished.seconds, *(v for v in asdict(finished.accuracy).values() if type(v) is not bool)]
        if not all(isinstance(value, kind) for value, kind in [*kinds, *((w, str) for w in finished.warnings)]):
            raise TypeError("a value of another kind")
        if not all(map(is_number, numbers)) or finished.seconds < 0:
            raise ValueError("a number that was not measured")
        return finished


class Output:
    """The output of a run. As a context it holds the lock, and decides at its end which partial files stay.

    Order of calls: plan_parts(), begin(), for each tensor start(), write() and finish(), then complete() and publish().
    """

    def __init__(self, path: Path, force: bool, is_split: bool = False):
        """path: OUT with links resolved; force: it may exist; is_split: parts with names made from it take its place."""
        self.path, self.force, self.is_split = path, force, is_split
        self.journal_path = journal_of(path)
        self.parts: list[Part] = []
        self.finished: list[FinishedTensor] = []
        self.n_bytes = 0
        self._alignment = 1
        self._sizes: list[int] = []
        self._headers: list[int] = []
        self._possible: Sequence[Mapping[str, int]] = []
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        stays = False
        if error is not None and self._begun:
            was_stopped = not isinstance(error, Exception) or isinstance(error, (Unfinished, MemoryError, BrokenPipeError))
            is_sound = not self._is_whole and isinstance(error, UserError) and not isinstance(error, FileChanged)
            stays = (was_stopped or is_sound) and bool(self.finished)
            if stays:
                error.kept = self.describe_rest()  # type: ignore[attr-defined]  # of any error, for the last line of the command
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
        """Describe what is left, for the message of an interrupted run."""
        n_files = len({self._part_of(f.tensor) for f in self.finished})
        more = f" and {n_files - 1} more" if n_files > 1 else ""
        return (
            f"the same command goes on after {len(self.finished)} of {len(self._sizes)} tensors, which are in "
            f"{self.parts[0].partial}{more}"
        )

    # --- before the first tensor ---

    def check_absent(self) -> None:
        """Raise UserError if one of the files exists and may not be replaced."""
        for path in [part.path for part in self.parts] or ([] if self.is_split else [self.path]):
            if not self.force and os.path.lexists(path):
                raise UserError(f"OUT: {path} exists: choose another name or pass --force to replace it")

    def plan_parts(
        self, sizes: Sequence[int], *, n_header: int, alignment: int, max_bytes: int | None, find_read: Callable[[Path], str | None],
        largest: Sequence[int] | None = None,
    ) -> None:
        """Decide the parts.

        Args:
            sizes: bytes of the tensors.
            n_header: bytes of the metadata, about.
            alignment: of the tensors.
            max_bytes: of a part; None for one file.
            find_read: says what messages call a file that is read.
            largest: bytes that tensors may get, if those are more; none of them makes a part too large.

        Raises:
            UserError: one of the files may not be written, or there is no room for all.
        """
        self._sizes, self._alignment = list(sizes), alignment
        self.parts = split_parts(self.path, [pad(n, alignment) for n in largest or sizes], max_bytes)
        self.check_absent()
        for part in self.parts:
            if part.path.is_dir():
                raise UserError(f"OUT: {part.path} is a directory: choose another name")
            for path in (part.path, part.partial, part.replaced):
                if what := find_read(path):
                    raise UserError(f"OUT: {path} is the same file as {what}: choose another name")
        self.n_bytes = sum(pad(n, alignment) for n in sizes) + n_header
        with self._errors():
            removed = {p.partial for p in self.parts} | set(self._find_partials())  # written again, or removed
            n_reusable = sum(map(allocated_bytes, removed))
            check_free_space(self.path.parent, self.n_bytes, str(self.path), "", "write to another disk", n_reusable=n_reusable)

    def _needed(self) -> str:
        return f"{self.path} needs {self.n_bytes / MIB:,.2f} MiB"

    def _part_of(self, tensor: int) -> int:
        return next(n for n, part in enumerate(self.parts) if tensor < part.last)

    @property
    def _lock_file(self) -> BinaryIO:
        """The journal, which is open within the context."""
        assert self._journal is not None
        return self._journal

    def _lines(self) -> list[bytes]:
        """Read the complete lines of the journal."""
        self._lock_file.seek(0)
        return [line for line in self._lock_file.read().splitlines(keepends=True) if line.endswith(b"\n")]

    def _head(self) -> dict | None:
        """Parse the journal's first line; None for a new journal, {} for one that cannot be read."""
        lines = self._lines()
        if not lines:
            return None if not os.fstat(self._lock_file.fileno()).st_size else {}
        try:
            head = parse_json(lines[0])
            good = head["format"] == JOURNAL_FORMAT and isinstance(head["made_from"], dict)
            return head if good and all(isinstance(f, str) for f in head["files"]) else {}
        except (ValueError, TypeError, KeyError):
            return {}

    def _find_partials(self) -> list[Path]:
        """List the partial files of an earlier run on OUT. Nothing else, whatever the journal says."""
        names = [n for n in (self._head() or {}).get("files", []) if re.fullmatch(r"\.[^/\\]+\.partial", n)]
        paths = dict.fromkeys([*map(self.path.with_name, names), partial_path(self.path)])
        return [p for p in paths if is_plain_file(p)]

    def begin(
        self, dependencies: dict, headers: Sequence[bytes], possible: Sequence[Mapping[str, int]], note: Callable[[str], None]
    ) -> None:
        """Resume an interrupted run, or remove what it left. `finished` holds the tensors that need not be encoded again.

        Args:
            dependencies: what the bytes depend on, by name, for JSON.
            headers: of each part; complete() gets the final ones, of the same lengths.
            possible: the types that each tensor may have, and its bytes in them.
            note: called with a line about the earlier run.
        """
        self._headers, self._possible = [len(h) for h in headers], possible
        with self._errors():
            head, partials = self._head(), self._find_partials()
            self._begun = True
            files = [part.partial.name for part in self.parts]
            if head and head["files"] == files and head["made_from"] == dependencies:
                self._resume()
                if self.finished:
                    note(f"an earlier run was stopped: going on after {len(self.finished)} of {len(self._sizes)} tensors")
                    return
                note("an earlier run was stopped, and what it left is incomplete or changed: started anew")
            elif head is not None or partials:
                changed = [key for key in dependencies if dependencies[key] != head["made_from"].get(key)] if head else []
                reason = f"not of the same {', '.join(changed)}" if changed else "of which too little is known"
                what = ", ".join(p.name for p in partials) or self.journal_path.name
                note(f"an earlier run was stopped: started anew, what it left is {reason} and was removed: {what}")
            self._close_part()
            for path in {*partials, *(p.partial for p in self.parts)}:
                path.unlink(missing_ok=True)  # not written over: it may be a file that has its name already
            self._lock_file.seek(0)
            self._lock_file.truncate()
            self._add_line({"format": JOURNAL_FORMAT, "made_from": dependencies, "files": files})

    def _resume(self) -> None:
        """Take over finished tensors as long as their data are what the journal says; cut off what comes after."""
        lines = self._lines()
        n_bytes = len(lines[0])
        for i, line in enumerate(lines[1:]):
            try:
                finished = FinishedTensor.parse(line)
            except (ValueError, TypeError, KeyError):
                break
            is_next = finished.tensor == i < len(self._sizes)
            if not is_next or finished.n_bytes != self._possible[i].get(finished.type) or not self._holds(finished):
                break
            self.finished.append(finished)
            n_bytes += len(line)
        self._lock_file.seek(n_bytes)
        self._lock_file.truncate()

    def _holds(self, finished: FinishedTensor) -> bool:
        """Whether the partial file has the data of a tensor."""
        file = self._open_part(self._part_of(finished.tensor))
        file.seek(self._end_of(self._part))
        digest, n_left = hashlib.sha256(), finished.n_bytes
        while n_left and (piece := file.read(min(n_left, PIECE))):
            digest.update(piece)
            n_left -= len(piece)
        return not n_left and digest.hexdigest() == finished.sha256

    # --- tensors ---

    def data_of(self, tensor: int) -> np.ndarray | None:
        """Read the data of a finished tensor, uint8; None for another."""
        if tensor >= len(self.finished):
            return None
        n, finished = self._part_of(tensor), self.finished[tensor]
        with self._errors(), open(self.parts[n].partial, "rb") as f:
            f.seek(self._offset(n, tensor))
            return np.frombuffer(f.read(finished.n_bytes), np.uint8)

    def _open_part(self, n: int) -> BinaryIO:
        if n != self._part or self._file is None:
            if self._file is not None:
                sync(self._file)
            self._close_part()
            self._file, self._part = open_file(self.parts[n].partial), n
        return self._file

    def _close_part(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._part = None, -1

    def _end_of(self, n: int) -> int:
        """Return where the finished data of a part end."""
        return self._offset(n, self.parts[n].last)

    def _offset(self, n: int, tensor: int) -> int:
        """Return where the finished data of a part's tensors before this one end."""
        return self._headers[n] + sum(pad(f.n_bytes, self._alignment) for f in self.finished[self.parts[n].first : tensor])

    def start(self, tensor: int) -> None:
        """Start a tensor, or start it again: what is written from now on is its data."""
        assert tensor == len(self.finished)
        with self._errors():
            file = self._open_part(self._part_of(tensor))
            file.seek(self._end_of(self._part))
            self._hash, self._written = hashlib.sha256(), 0

    def write(self, data: np.ndarray) -> None:
        """Write data of the tensor, contiguous."""
        with self._errors():
            self._open_part(self._part).write(data.data)
        self._hash.update(data.data)
        self._written += data.nbytes

    def finish(self, type_name: str, accuracy: Accuracy, seconds: float, warnings: list[str]) -> None:
        """Finish the tensor that was started."""
        with self._errors():
            file = self._open_part(self._part)
            file.write(bytes(pad(self._written, self._alignment) - self._written))
            file.flush()  # data first: the journal must not say more than there is
            finished = FinishedTensor(
                tensor=len(self.finished), type=type_name, n_bytes=self._written, sha256=self._hash.hexdigest(), seconds=seconds,
                accuracy=accuracy, warnings=warnings,
            )
            self._add_line(asdict(finished))
            self.finished.append(finished)

    def _add_line(self, line: dict) -> None:
        self._lock_file.write(json.dumps(line).encode() + b"\n")
        self._lock_file.flush()

    # --- the end ---

    def complete(self, headers: Sequence[bytes]) -> None:
        """Write all headers; the partial files are complete then."""
        assert len(self.finished) == len(self._sizes) and [len(h) for h in headers] == self._headers
        with self._errors():
            for n, header in enumerate(headers):
                file = self._open_part(n)
                file.seek(0)
                file.write(header)
                file.truncate(self._end_of(n))
                sync(file)
        self._is_whole = True

    def publish(self) -> None:
        """Give the files their names, all or none. Unfinished if one cannot get its name, or exists by now without force."""
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
        """Rename the file that a part replaces; whether there was one. A single file needs no other name."""
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
        """Raise errors of the file system as UserError, in one line."""
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


