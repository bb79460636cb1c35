"""Files that are written: under a hidden name until they are whole, locks on folders, what a file is recognised by."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from .json import parse_json

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None

# EFBIG is what a file size limit (ulimit -f) gives.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What file systems without hard links say.
NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
# What those say of fsync() that have none.
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
MAX_NAME_BYTES = 200  # of 255, for what is added
FRESH_SECONDS = 10
LOCK_ATTEMPTS = 100


def partial_path(path: Path) -> Path:
    """The name that a file has until it is whole."""
    name = path.name
    if len(raw := os.fsencode(name)) > MAX_NAME_BYTES:
        name = f"{name[:MAX_NAME_BYTES // 8]}-{hashlib.sha256(raw).hexdigest()[:16]}"
    return path.with_name(f".{name}.partial")


def open_file(path: Path) -> BinaryIO:
    """For reading and writing, made where it is missing; no links are followed: names of partial files can be guessed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    return open(fd, "r+b")


def move_into_place(partial: Path, path: Path, force: bool) -> None:
    """The partial file gets a name, and may keep its own. FileExistsError if there is one, without force."""
    if force:
        os.replace(partial, path)
        return
    try:
        os.link(partial, path)  # which replaces nothing
    except FileExistsError:
        raise
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError from e
        os.replace(partial, path)


@contextlib.contextmanager
def write_atomically(path: Path, force: bool = True) -> Iterator[Path]:
    """The name, this process's alone, of a file that is written within it and then becomes `path`. It is removed after an error.
    FileExistsError if there is one by then, without force."""
    part = partial_path(path).with_suffix(f".{os.getpid()}.part")
    try:
        yield part
        move_into_place(part, path, force)
    finally:
        part.unlink(missing_ok=True)


def free_space(folder: Path) -> float:
    """Bytes that may be written; without end where the drive does not say, as some network and FUSE drives do not."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else math.inf


def sync(file: BinaryIO) -> None:
    """What was written goes to the disk, if the drive can be told so."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as e:
        if e.errno not in NO_SYNC:
            raise


def mapping_error(path: Path, error: OSError) -> str:
    """What to say where a file cannot be mapped into memory."""
    drive = ", its drive does not allow it: copy it to a local disk" if error.errno == errno.ENODEV else ""
    return f"cannot map {path} into memory ({error.strerror}){drive}"


def allocated_bytes(path: Path) -> int:
    """Bytes on the disk that a file takes."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return getattr(found, "st_blocks", 0) * 512


def is_plain_file(path: Path) -> bool:
    """False for links, and for names that no file can have."""
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


@contextlib.contextmanager
def lock_directory(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Within it a lock on the folder is held, unless the value is False. waiting: called before it waits for another run's; None:
    it does not wait."""
    if fcntl is None:
        yield False
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        has_lock = _flock(fd, waiting)
        yield has_lock
    finally:
        os.close(fd)


def _flock(fd: int, waiting: Callable[[], None] | None) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if waiting is None:
            return False
    except OSError:  # a file system without locks
        return False
    waiting()
    fcntl.flock(fd, fcntl.LOCK_EX)
    return True


def remove_stale_directories(folder: Path, prefix: str, say: Callable[[str], None]) -> None:
    """Removes folders for temporary files whose run was killed, and names them: nobody holds the lock of such a folder."""
    for path in folder.glob(f"{prefix}*"):
        # not one that was made this moment, and will be locked in the next
        if path.is_symlink() or not path.is_dir() or time.time() - path.stat().st_mtime < FRESH_SECONDS:
            continue
        with lock_directory(path) as has_lock:
            if has_lock:
                shutil.rmtree(path, ignore_errors=True)
                say(f"removed what a killed run left: {path}")


@contextlib.contextmanager
def temporary_directory(folder: Path, prefix: str, say: Callable[[str], None]) -> Iterator[Path]:
    """A folder of this process in another one, locked and removed at its end; what killed runs left of the same prefix goes before."""
    remove_stale_directories(folder, prefix, say)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as name, lock_directory(Path(name)):
        yield Path(name)


class Described(Protocol):
    """What a JSON file says of the file beside it."""

    result: dict  # fingerprint


Record = TypeVar("Record", bound=Described)


def read_record(cls: type[Record], path: Path, kept: Path) -> Record | None:
    """Of a dataclass whose fields are the keys; None if there is no such record at `path`, or if `kept` is another file than it
    describes. cls raises ValueError for values that are none: the file may have been written by anyone."""
    try:
        record = cls(**parse_json(path.read_text()))
        return record if record.result == fingerprint(kept) else None
    except (OSError, ValueError, TypeError):
        return None


def fingerprint(path: Path, n_header: int = 0) -> dict:
    """Size and SHA-256 of the first n_header bytes and of 256 pieces of 16 KiB spread over the file, of a short file all."""
    n_bytes, n_pieces, piece = path.stat().st_size, 256, 16384
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        if n_bytes <= n_pieces * piece:
            digest.update(f.read())
        else:
            digest.update(f.read(n_header))
            for i in range(n_pieces):
                f.seek((n_bytes - piece) * i // (n_pieces - 1))
                digest.update(f.read(piece))
    return {"bytes": n_bytes, "sha256": digest.hexdigest()}
