"""Files whose bytes many threads read at any place. Not mapped: where a mapped file is cut off or its disk fails, the process ends
with a bus error."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

from .errors import UserError

WAY_OUT = "run it again once nothing writes to the file"


class FileChanged(UserError):
    """What was read is of no use."""


class FileReader:
    """An open file. OSError where it cannot be opened."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._fd)
        self._opened = os.fstat(self._fd)
        self.n_bytes = self._opened.st_size

    def __reduce__(self):
        raise TypeError("an open file is of one process")

    def read(self, start: int, n_bytes: int) -> bytes:
        """UserError where that many cannot be read."""
        pieces, end = [], start + n_bytes
        while start < end:  # one call reads 2 GiB at most
            try:
                piece = os.pread(self._fd, end - start, start)
            except OSError as e:
                raise UserError(f"cannot read {self.path} at byte {start:,}: {e.strerror}; check the disk, or copy the file to another one") from e
            if not piece:
                raise FileChanged(f"{self.path} was cut off at byte {start:,} while it was read, {end:,} are needed: {WAY_OUT}")
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def is_hole(self, start: int, n_bytes: int) -> bool:
        """Whether these bytes are zeros that take no room on the disk; False where the file system does not say."""
        try:
            return os.lseek(self._fd, start, os.SEEK_DATA) >= start + n_bytes
        except OSError as e:
            return e.errno == errno.ENXIO  # nothing but zeros is left
        except AttributeError:
            return False

    def check_unchanged(self) -> None:
        """FileChanged where the path is of another file by now, or the file was written to after it was opened."""
        was = self._opened
        try:
            now = os.stat(self.path)
        except OSError:
            raise FileChanged(f"{self.path} was moved or removed while it was read: put it back, and run it again") from None
        if not os.path.samestat(was, now):
            raise FileChanged(f"{self.path} was replaced by another file while it was read: {WAY_OUT}")
        if now.st_size != was.st_size:
            raise FileChanged(f"{self.path} changed while it was read, from {was.st_size:,} to {now.st_size:,} bytes: {WAY_OUT}")
        if now.st_mtime_ns != was.st_mtime_ns:
            raise FileChanged(f"{self.path} was written to while it was read: {WAY_OUT}")
