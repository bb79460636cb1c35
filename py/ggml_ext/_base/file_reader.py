"""Files that many threads read at any position. They are not mapped: if a mapped file is truncated or its disk fails, the process dies
of a bus error."""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import NoReturn

from .errors import UserError

_RETRY = "run it again once nothing writes to the file"


class FileChanged(UserError):
    """A file changed while it was read; what was read is useless."""


class FileReader:
    """An open file. The constructor raises OSError if it cannot be opened."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._fd)
        self._opened = os.fstat(self._fd)
        self._lock = threading.Lock()
        self.n_bytes = self._opened.st_size

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open file cannot be passed to another process")

    def read(self, start: int, n_bytes: int) -> bytes:
        """Read exactly n_bytes. UserError if the file does not have them."""
        pieces, end = [], start + n_bytes
        while start < end:  # one call reads 2 GiB at most
            try:
                piece = self._read_at(end - start, start)
            except OSError as e:
                raise UserError(f"cannot read {self.path} at byte {start:,}: {e.strerror}; check the disk, or copy the file to another one") from e
            if not piece:
                raise FileChanged(f"{self.path} was truncated at byte {start:,} while it was read, {end:,} are needed: {_RETRY}")
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_at(self, n_bytes: int, start: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._fd, n_bytes, start)
        with self._lock:  # Windows: threads share the position
            os.lseek(self._fd, start, os.SEEK_SET)
            return os.read(self._fd, n_bytes)

    def is_hole(self, start: int, n_bytes: int) -> bool:
        """Return whether these bytes are a hole of a sparse file; False if the file system does not tell."""
        if sys.platform == "win32":
            return False
        try:
            return os.lseek(self._fd, start, os.SEEK_DATA) >= start + n_bytes
        except OSError as e:
            return e.errno == errno.ENXIO  # no data up to the end
        except AttributeError:
            return False

    def check_unchanged(self) -> None:
        """Raise FileChanged if the path now names another file, or the file was written to after it was opened."""
        opened = self._opened
        try:
            now = os.stat(self.path)
        except OSError:
            raise FileChanged(f"{self.path} was moved or removed while it was read: put it back, and run it again") from None
        if not os.path.samestat(opened, now):
            raise FileChanged(f"{self.path} was replaced by another file while it was read: {_RETRY}")
        if now.st_size != opened.st_size:
            raise FileChanged(f"{self.path} changed while it was read, from {opened.st_size:,} to {now.st_size:,} bytes: {_RETRY}")
        if now.st_mtime_ns != opened.st_mtime_ns:
            raise FileChanged(f"{self.path} was written to while it was read: {_RETRY}")
