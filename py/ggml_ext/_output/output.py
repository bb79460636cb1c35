"""The output of a run: one file or the parts of a split model, locked, and written under hidden names until complete.

The data go to .model.gguf.partial. The journal .model.gguf.partial.json has a JSON line with the dependencies of the bytes, then one per
finished tensor with the SHA-256 of its data. A run holds a lock on the journal, which ends with the process. An interrupted run keeps
both files if a tensor is finished, and a run with the same input, options and version resumes. If the data are wrong, because the input
changed or --verify failed, both are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from .._base.errors import UserError
from .._base.file_reader import FileChanged
from .._base.files import (
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
from .._base.locks import lock_file
from .._base.signals import ignore_signals
from .._base.units import MIB
from .._encode.accuracy import Accuracy
from .._formats.gguf_file import pad
from .._formats.reserved_paths import journal_of
from .parts import Part, keep_mode, split_parts, take_back

PIECE = 4 * MIB  # bytes per read
JOURNAL_FORMAT = 2
LOCK_ATTEMPTS = 100


class UnfinishedError(UserError):
    """An error after which complete partial files stay valid. Any other UserError after complete() means that --verify failed."""


@dataclass(frozen=True)
class FinishedTensor:
    """A line of the journal: a tensor whose data are in a partial file."""

    tensor: int  # its index in the file; a key of the journal
    type: str  # after --fallback-above
    n_bytes: int  # without padding
    sha256: str
    seconds: float
    accuracy: Accuracy
    warnings: list[str]  # raised while encoding

    @classmethod
    def parse(cls, line: bytes) -> FinishedTensor:
        """Parse a line. ValueError, TypeError or KeyError if it is invalid."""
        values = parse_json(line)
        values["accuracy"] = Accuracy(**values["accuracy"])
        finished = cls(**values)
        kinds = [(finished.tensor, int), (finished.type, str), (finished.n_bytes, int), (finished.sha256, str), (finished.warnings, list)]
        numbers = [finished.seconds, *(v for v in asdict(finished.accuracy).values() if type(v) is not bool)]
        if not all(isinstance(value, kind) for value, kind in [*kinds, *((w, str) for w in finished.warnings)]):
            raise TypeError("a value has the wrong type")
        if not all(map(is_number, numbers)) or finished.seconds < 0:
            raise ValueError("a number is out of range")
        return finished


class Output:
    """The output of a run. As a context manager it holds the lock, and at the end keeps or removes the partial files.

    Order of calls: plan_parts(), begin(), for each tensor start(), write() and finish(), then complete() and publish().
    """

    def __init__(self, path: Path, force: bool, is_split: bool = False):
        """path: OUT with links resolved; force: replace existing files; is_split: write parts of a split model."""
        self.path, self.force, self.is_split = path, force, is_split
        self.journal_path = journal_of(path)
        self.parts: list[Part] = []
        self.finished: list[FinishedTensor] = []
        self.n_bytes = 0
        self._alignment = 1
        self._sizes: list[int] = []
        self._header_sizes: list[int] = []
        self._possible: Sequence[Mapping[str, int]] = []
        self._journal: BinaryIO | None = None
        self._file: BinaryIO | None = None
        self._part = -1  # number of the part that is open
        self._begun = self._is_complete = False
        self._hash, self._written = hashlib.sha256(), 0

    # --- the lock ---

    def __enter__(self) -> Output:
        with self._errors():
            self._lock()
        try:
            self.check_absent()  # again: another run may have written it before the lock
        except UserError as e:
            self.__exit__(type(e), e, None)
            raise
        return self

    def _lock(self) -> None:
        for _ in range(LOCK_ATTEMPTS):
            self._journal = open_file(self.journal_path)
            try:
                if not lock_file(self._journal.fileno()):
                    return
            except BlockingIOError:
                self._journal.close()
                raise UserError(f"OUT: another run is writing {self.path}: wait until it ends, or name another file") from None
            # the previous holder of the lock may have removed the file
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._journal.fileno()), os.lstat(self.journal_path)):
                    return
            self._journal.close()
        raise UserError(f"OUT: cannot lock {self.journal_path}, other runs keep creating and removing it: name another file")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Keep the partial files if repeating the command can resume, else remove them. Close the files, which releases the lock."""
        keep = False
        if not self._begun:  # leave the files of an interrupted run alone
            keep = self._journal is not None and os.fstat(self._journal.fileno()).st_size > 0
        elif error is not None and self._can_resume(error):
            keep = True
            error.kept = self.describe_resume()  # type: ignore[attr-defined]  # run_command() prints it
        if not keep:
            self._remove([part.partial for part in self.parts] if self._begun else [])
        self._close()

    def _can_resume(self, error: BaseException) -> bool:
        """Whether a tensor is finished, and the error leaves the data correct."""
        if not self.finished:
            return False
        if not isinstance(error, Exception) or isinstance(error, (UnfinishedError, MemoryError, BrokenPipeError)):
            return True  # an interrupt, or the machine lacks something
        is_failed_verify = self._is_complete
        return isinstance(error, UserError) and not isinstance(error, FileChanged) and not is_failed_verify

    def _remove(self, partials: Sequence[Path]) -> None:
        """Remove partial files and the journal: under the lock, except on Windows, which removes no open file."""
        with contextlib.suppress(OSError):
            self._close_part()
        for path in (*partials, self.journal_path):
            if sys.platform == "win32" and path == self.journal_path:
                self._close()
            with contextlib.suppress(OSError):
                path.unlink()

    def _close(self) -> None:
        """Close the partial file and the journal, which releases the lock."""
        for f in (self._file, self._journal):
            if f is not None:
                with contextlib.suppress(OSError):
                    f.close()  # may fail while flushing
        self._file = self._journal = None

    def describe_resume(self) -> str:
        """Describe how to resume, for the message of an interrupted run."""
        n_files = len({self._part_of(f.tensor) for f in self.finished})
        more = f" and {n_files - 1} more" if n_files > 1 else ""
        return (
            f"repeat the command to resume after {len(self.finished)} of {len(self._sizes)} tensors (in "
            f"{self.parts[0].partial}{more})"
        )

    # --- before the first tensor ---

    def check_absent(self) -> None:
        """Raise UserError if one of the files exists, without force."""
        for path in [part.path for part in self.parts] or ([] if self.is_split else [self.path]):
            if not self.force and os.path.lexists(path):
                raise UserError(f"OUT: {path} exists: choose another name or pass --force to replace it")

    def plan_parts(
        self, sizes: Sequence[int], *, n_header: int, alignment: int, max_bytes: int | None, describe_input: Callable[[Path], str | None],
        largest: Sequence[int] | None = None,
    ) -> None:
        """Assign tensors to parts, and check the files and the free space.

        Args:
            sizes: bytes of the tensors.
            n_header: approximate bytes of the metadata.
            alignment: of tensor data.
            max_bytes: maximum size of a part; None for one file.
            describe_input: returns what messages call an input file, None for other files.
            largest: maximum bytes of the tensors if --fallback-above may enlarge them; parts have room for these.

        Raises:
            UserError: a file may not be written, or the disk is too full.
        """
        self._sizes, self._alignment = list(sizes), alignment
        self.parts = split_parts(self.path, [pad(n, alignment) for n in largest or sizes], max_bytes)
        self.check_absent()
        for part in self.parts:
            if part.path.is_dir():
                raise UserError(f"OUT: {part.path} is a directory: choose another name")
            for path in (part.path, part.partial, part.replaced):
                if what := describe_input(path):
                    raise UserError(f"OUT: {path} is the same file as {what}: choose another name")
        self.n_bytes = sum(pad(n, alignment) for n in sizes) + n_header
        with self._errors():
            removed = {p.partial for p in self.parts} | set(self._find_partials())  # their space is available
            n_reusable = sum(map(allocated_bytes, removed))
            check_free_space(self.path.parent, self.n_bytes, str(self.path), "", "write to another disk", n_reusable=n_reusable)

    def _needed(self) -> str:
        return f"{self.path} needs {self.n_bytes / MIB:,.2f} MiB"

    def _part_of(self, tensor_index: int) -> int:
        return next(n for n, part in enumerate(self.parts) if tensor_index < part.last)

    @property
    def _open_journal(self) -> BinaryIO:
        assert self._journal is not None
        return self._journal

    def _lines(self) -> list[bytes]:
        """Read the complete lines of the journal."""
        self._open_journal.seek(0)
        return [line for line in self._open_journal.read().splitlines(keepends=True) if line.endswith(b"\n")]

    def _read_journal_head(self) -> dict | None:
        """Parse the journal's first line; None for a new journal, {} for one that cannot be read."""
        lines = self._lines()
        if not lines:
            return None if not os.fstat(self._open_journal.fileno()).st_size else {}
        try:
            head = parse_json(lines[0])
            good = head["format"] == JOURNAL_FORMAT and isinstance(head["made_from"], dict)
            return head if good and all(isinstance(f, str) for f in head["files"]) else {}
        except (ValueError, TypeError, KeyError):
            return {}

    def _find_partials(self) -> list[Path]:
        """List the partial files of an interrupted run. Names in the journal are not trusted: only .*.partial next to OUT."""
        names = [n for n in (self._read_journal_head() or {}).get("files", []) if re.fullmatch(r"\.[^/\\]+\.partial", n)]
        paths = dict.fromkeys([*map(self.path.with_name, names), partial_path(self.path)])
        return [p for p in paths if is_plain_file(p)]

    def begin(
        self, dependencies: dict, headers: Sequence[bytes], possible: Sequence[Mapping[str, int]], note: Callable[[str], None]
    ) -> None:
        """Resume an interrupted run, or discard its files. `finished` then lists the tensors that need no encoding.

        Args:
            dependencies: what the bytes depend on, by name, for JSON.
            headers: preliminary headers of the parts; complete() gets the final ones, of the same lengths.
            possible: for each tensor, its possible types and its bytes in them.
            note: called with a line about the interrupted run.
        """
        self._header_sizes, self._possible = [len(h) for h in headers], possible
        with self._errors():
            head, partials = self._read_journal_head(), self._find_partials()
            self._begun = True
            files = [part.partial.name for part in self.parts]
            if head and head["files"] == files and head["made_from"] == dependencies:
                self._resume()
                if self.finished:
                    note(f"resuming after {len(self.finished)} of {len(self._sizes)} tensors")
                    return
                note("discarding stale partial output: incomplete or changed")
            elif head is not None or partials:
                changed = [key for key in dependencies if dependencies[key] != head["made_from"].get(key)] if head else []
                reason = f"different {', '.join(changed)}" if changed else "no valid journal"
                names = ", ".join(p.name for p in partials) or self.journal_path.name
                note(f"discarding stale partial output ({reason}): {names}")
            self._close_part()
            for path in {*partials, *(p.partial for p in self.parts)}:
                path.unlink(missing_ok=True)  # do not overwrite: it may be hard-linked to a published file
            self._open_journal.seek(0)
            self._open_journal.truncate()
            self._add_line({"format": JOURNAL_FORMAT, "made_from": dependencies, "files": files})

    def _resume(self) -> None:
        """Reuse finished tensors up to the first whose data do not match the journal; truncate the journal after them."""
        lines = self._lines()
        n_bytes = len(lines[0])
        for i, line in enumerate(lines[1:]):
            try:
                finished = FinishedTensor.parse(line)
            except (ValueError, TypeError, KeyError):
                break
            if finished.tensor != i or i >= len(self._sizes):
                break
            if finished.n_bytes != self._possible[i].get(finished.type) or not self._has_data(finished):
                break
            self.finished.append(finished)
            n_bytes += len(line)
        self._open_journal.seek(n_bytes)
        self._open_journal.truncate()

    def _has_data(self, finished: FinishedTensor) -> bool:
        """Whether the partial file has the data of the next tensor, with their checksum."""
        file = self._open_part(self._part_of(finished.tensor))
        file.seek(self._end_of(self._part))
        digest, n_missing = hashlib.sha256(), finished.n_bytes
        while n_missing and (piece := file.read(min(n_missing, PIECE))):
            digest.update(piece)
            n_missing -= len(piece)
        return not n_missing and digest.hexdigest() == finished.sha256

    # --- tensors ---

    def read_data(self, tensor_index: int) -> np.ndarray | None:
        """Read the data of a finished tensor, uint8; None if it is not finished."""
        if tensor_index >= len(self.finished):
            return None
        n, finished = self._part_of(tensor_index), self.finished[tensor_index]
        with self._errors(), open(self.parts[n].partial, "rb") as f:
            f.seek(self._offset(n, tensor_index))
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
        """Return the offset in part n at which its next tensor begins: the end of its finished ones."""
        return self._offset(n, self.parts[n].last)

    def _offset(self, n: int, tensor_index: int) -> int:
        """Return the offset of a tensor in part n, which holds its header and then the padded data of finished tensors."""
        return self._header_sizes[n] + sum(pad(f.n_bytes, self._alignment) for f in self.finished[self.parts[n].first : tensor_index])

    def start(self, tensor_index: int) -> None:
        """Start or restart a tensor."""
        assert tensor_index == len(self.finished)
        with self._errors():
            file = self._open_part(self._part_of(tensor_index))
            file.seek(self._end_of(self._part))
            self._hash, self._written = hashlib.sha256(), 0

    def write(self, data: np.ndarray) -> None:
        """Append contiguous data to the current tensor."""
        with self._errors():
            self._open_part(self._part).write(data.data)
        self._hash.update(data.data)
        self._written += data.nbytes

    def finish(self, type_name: str, accuracy: Accuracy, seconds: float, warnings: list[str]) -> None:
        """Finish the current tensor and add it to the journal."""
        with self._errors():
            file = self._open_part(self._part)
            file.write(bytes(pad(self._written, self._alignment) - self._written))
            file.flush()  # before the journal, which must not run ahead of the data
            finished = FinishedTensor(
                tensor=len(self.finished), type=type_name, n_bytes=self._written, sha256=self._hash.hexdigest(), seconds=seconds,
                accuracy=accuracy, warnings=warnings,
            )
            self._add_line(asdict(finished))
            self.finished.append(finished)

    def _add_line(self, line: dict) -> None:
        self._open_journal.write(json.dumps(line).encode() + b"\n")
        self._open_journal.flush()

    # --- the end ---

    def complete(self, headers: Sequence[bytes]) -> None:
        """Write the final headers. The partial files are complete afterwards."""
        assert len(self.finished) == len(self._sizes) and [len(h) for h in headers] == self._header_sizes
        with self._errors():
            for n, header in enumerate(headers):
                file = self._open_part(n)
                file.seek(0)
                file.write(header)
                file.truncate(self._end_of(n))
                sync(file)
        self._is_complete = True

    def publish(self) -> None:
        """Rename the partial files to their final names, all or none.

        Raises:
            UnfinishedError: a file cannot be renamed or, without force, its final name exists by now.
        """
        ignore_signals()  # an interrupt would report a written file as not written
        with self._errors():
            self._close_part()
        renamed, set_aside = [], []
        try:
            for part in self.parts:
                if self.force:
                    keep_mode(part)
                    set_aside += [part] if self._set_aside(part) else []
                move_into_place(part.partial, part.path, self.force)  # may hard-link; the partial name is removed with the journal
                renamed.append(part)
        except OSError as e:
            for done in renamed:
                with contextlib.suppress(OSError):
                    take_back(done)
            for done in set_aside:
                with contextlib.suppress(OSError):
                    os.replace(done.replaced, done.path)
            raise UnfinishedError(f"OUT: {part.path} {self._describe_rename_error(e)}") from e
        for part in set_aside:
            with contextlib.suppress(OSError):
                part.replaced.unlink()

    def _set_aside(self, part: Part) -> bool:
        """Rename the file that a part of a split model replaces, so that publish() can restore it. Return whether there was one.

        A single file does not need this: renaming over the existing file is atomic.
        """
        if len(self.parts) == 1 or not os.path.lexists(part.path) or part.path.is_dir():
            return False
        os.replace(part.path, part.replaced)
        return True

    def _describe_rename_error(self, error: OSError) -> str:
        if isinstance(error, FileExistsError) and not self.force:
            return "appeared during the run and was not overwritten: move it away, or pass --force to replace it"
        return f"cannot be written: {error.strerror}; move whatever is there away"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert file system errors to UserError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as e:
            if e.errno in NO_SPACE:
                raise UnfinishedError(
                    f"no space left on device ({e.strerror}): {self._needed()}; free some space or write to another disk"
                ) from e
            raise UserError(f"cannot write {self.path}: {e.strerror}; choose a writable directory") from e
