"""Files that are written under a hidden name until they are complete, temporary directories, and fingerprints of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from .errors import UserError
from .json import parse_json
from .locks import lock_directory
from .units import MIB

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: a file size limit (ulimit -f)
# Errors of link() and fsync() on file systems that lack them.
NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
MAX_NAME_BYTES = 200  # of 255; the rest is for what is added
FRESH_SECONDS = 10


def partial_path(path: Path) -> Path:
    """Return the path under which a file is written until it is complete."""
    name = path.name
    if len(raw := os.fsencode(name)) > MAX_NAME_BYTES:
        name = f"{name[:MAX_NAME_BYTES // 8]}-{hashlib.sha256(raw).hexdigest()[:16]}"
    return path.with_name(f".{name}.partial")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading and writing, and create it if it is missing. Follows no link, because names of partial files are predictable."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
    return open(fd, "r+b")


def move_into_place(partial: Path, path: Path, force: bool) -> None:
    """Give a partial file its final name; it may keep the old one too. FileExistsError if `path` exists and force is False."""
    if force:
        os.replace(partial, path)
        return
    if sys.platform == "win32":
        os.rename(partial, path)  # never replaces a file there
        return
    try:
        os.link(partial, path)  # never replaces a file
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
    """Yield a temporary path that becomes `path` at the end, or is removed after an error.

    FileExistsError if `path` exists at the end and force is False.
    """
    part = partial_path(path).with_suffix(f".{os.getpid()}.part")
    try:
        yield part
        move_into_place(part, path, force)
    finally:
        part.unlink(missing_ok=True)


def free_space(directory: Path) -> float:
    """Return the bytes that can be written; infinity if the drive does not tell, as some network and FUSE drives do not."""
    usage = shutil.disk_usage(directory)
    return usage.free if usage.total else math.inf


def check_free_space(directory: Path, n_bytes: float, what: str, purpose: str, hint: str, n_reusable: int = 0) -> None:
    """Raise UserError if a directory has no room for n_bytes.

    Args:
        directory: where they are to be written.
        n_bytes: that are needed.
        what: needs them; the message begins with it.
        purpose: follows the size, such as " for out.gguf"; may be empty.
        hint: what to do besides freeing space.
        n_reusable: bytes of files that are removed first.
    """
    if (free := free_space(directory) + n_reusable) < n_bytes:
        digits = 2 if n_bytes < 100 * MIB else 0
        raise UserError(
            f"no space left on device: {what} needs {n_bytes / MIB:,.{digits}f} MiB{purpose}, {free / MIB:,.{digits}f} MiB are free in "
            f"{directory}; free some space, or {hint}"
        )


def sync(file: BinaryIO) -> None:
    """Flush a file to the disk, if the drive supports that."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as e:
        if e.errno not in NO_SYNC:
            raise


def mapping_error(path: Path, error: OSError) -> str:
    """Return the message for a file that cannot be mapped into memory."""
    drive = ", its drive does not allow it: copy it to a local disk" if error.errno == errno.ENODEV else ""
    return f"cannot map {path} into memory ({error.strerror}){drive}"


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a file occupies on the disk."""
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return getattr(status, "st_blocks", 0) * 512


def is_plain_file(path: Path) -> bool:
    """Return whether the path is a file and no link; False for names that no file can have."""
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


def remove_stale_directories(parent: Path, prefix: str, log: Callable[[str], None]) -> None:
    """Remove the temporary directories of killed runs, which nobody has locked, and log their names."""
    for path in parent.glob(f"{prefix}*"):
        # a directory that was created just now may not be locked yet
        if path.is_symlink() or not path.is_dir() or time.time() - path.stat().st_mtime < FRESH_SECONDS:
            continue
        with lock_directory(path) as is_abandoned:
            pass  # Windows removes no open file, so the lock's must be closed
        if is_abandoned:
            shutil.rmtree(path, ignore_errors=True)
            log(f"removed temporary files of a killed run: {path}")


@contextlib.contextmanager
def temporary_directory(parent: Path, prefix: str, log: Callable[[str], None]) -> Iterator[Path]:
    """Yield a locked temporary directory, after removing those of killed runs with the same prefix.

    On Windows a file that is still open stays, and a later run removes it.
    """
    remove_stale_directories(parent, prefix, log)
    can_leave = sys.platform == "win32"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=can_leave) as name, lock_directory(Path(name)):
        yield Path(name)


class FileRecord(Protocol):
    """A dataclass stored as JSON next to the file that it describes. result: fingerprint of that file."""

    @property
    def result(self) -> dict[str, Any]: ...


Record = TypeVar("Record", bound=FileRecord)


def read_record(cls: type[Record], path: Path, described: Path) -> Record | None:
    """Read a dataclass whose fields are the JSON keys. None if there is no valid record, or `described` is another file than it says.

    cls raises ValueError for wrong values: anyone may have written the record.
    """
    try:
        record = cls(**parse_json(path.read_text()))
        return record if record.result == fingerprint(described) else None
    except (OSError, ValueError, TypeError):
        return None


def fingerprint(path: Path, n_header: int = 0) -> dict[str, Any]:
    """Return the file's size and the SHA-256 of its first n_header bytes and of 256 evenly spaced pieces of 16 KiB (all of a short file)."""
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


def identify_file(path: Path, n_header: int = 0) -> dict[str, Any]:
    """Return fingerprint() and the time of the last change."""
    return {**fingerprint(path, n_header), "modified": path.stat().st_mtime_ns}
