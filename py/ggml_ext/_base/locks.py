"""Locks on files and directories. They end with the process, also if it is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

POLL_SECONDS = 0.2
LOCK_FILE = ".ggml-ext.lock"  # in a locked directory on Windows
LOCKED_BYTE = 1 << 30  # Windows locks bytes, which no other process can then read or write; no journal is that long


def lock_file(fd: int) -> bool:
    """Lock an open file without waiting. Return False if its drive has no locks; BlockingIOError if another process holds the lock."""
    try:
        if sys.platform == "win32":
            _lock_byte(fd)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


if sys.platform == "win32":

    def _lock_byte(fd: int) -> None:
        position = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.ENOSYS):  # a drive without locks
                raise
            raise BlockingIOError(errno.EAGAIN, e.strerror) from e
        finally:
            os.lseek(fd, position, os.SEEK_SET)


@contextlib.contextmanager
def lock_directory(directory: Path, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Lock a directory; yields whether the lock is held. Some file systems have no locks.

    on_wait: called before waiting for another run's lock; None: do not wait.
    """
    is_windows = sys.platform == "win32"  # where a directory cannot be opened
    path, flags = (directory / LOCK_FILE, os.O_RDWR | os.O_CREAT) if is_windows else (directory, os.O_RDONLY)
    fd = os.open(path, flags, 0o666)
    try:
        yield _acquire(fd, on_wait)
    finally:
        os.close(fd)
        if is_windows:
            with contextlib.suppress(OSError):  # another process has it open
                path.unlink()


def _acquire(fd: int, on_wait: Callable[[], None] | None) -> bool:
    """Lock an open file, after waiting if on_wait is given."""
    is_waiting = False
    while True:
        try:
            return lock_file(fd)
        except BlockingIOError:
            if on_wait is None:
                return False
        if not is_waiting:
            on_wait()
            is_waiting = True
        time.sleep(POLL_SECONDS)
