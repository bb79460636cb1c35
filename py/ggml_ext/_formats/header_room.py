"""Change a file's first keys without moving its tensors.

The tensors follow the metadata, so a longer header moves them. Files of ggml-ext begin with ROOM_KEY, an array of bytes that programs ignore;
later keys take its place. Each step of write_first_keys() changes bytes of that array, which mean nothing, or the number of keys and the head of
the array, which are in the first sector of the file: a disk writes a sector completely or not at all, so the file can be read after a loss of power.
Other files are copied once, and the copy gets room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from gguf import GGUFValueType

from .._base.errors import UserError
from .._base.files import check_free_space, open_file, sync, write_atomically
from .gguf_file import GGUFFile, KeyValue, array_value, pad

PREFIX = "ggml_ext.quality."  # of the keys that share the room
ROOM_KEY = f"{PREFIX}room"
ROOM_BYTES = 2048  # of the entry
COUNT_AT, FIRST_AT = 16, 24  # offsets of the number of keys and of the first key
BLOCK = 4096  # a copy shares its data with the file on some file systems if it moves by a multiple of this


def entry_bytes(entries: Sequence[KeyValue]) -> bytes:
    """Serialize entries of the metadata."""
    return b"".join(struct.pack("<Q", len(kv.key.encode())) + kv.key.encode() + kv.raw for kv in entries)


def room_value(n_bytes: int = ROOM_BYTES) -> KeyValue:
    """Make the entry that keeps n_bytes free, its own overhead included."""
    return array_value(ROOM_KEY, GGUFValueType.UINT8, n_bytes - ROOM_HEAD, bytes(n_bytes - ROOM_HEAD))


ROOM_HEAD = len(entry_bytes([array_value(ROOM_KEY, GGUFValueType.UINT8, 0, b"")]))  # bytes of the entry before its content


def has_room(file: GGUFFile) -> bool:
    """Whether write_first_keys() can change the file without copying it."""
    group = _first_entries(file)
    return bool(group) and len(group) == sum(key.startswith(PREFIX) for key in file.metadata)


def _first_entries(file: GGUFFile) -> list[KeyValue]:
    return list(takewhile(lambda kv: kv.key.startswith(PREFIX), file.metadata.values()))


def check_writable(file: GGUFFile) -> None:
    """Raise UserError if write_first_keys() would fail: a read-only file, a cache of the hub, or no space for a copy."""
    path = Path(os.path.realpath(file.path))
    if path.parent.name == "blobs" and (path.parent.parent / "snapshots").is_dir():
        raise UserError(f"--write: {file.path} is in the cache of the Hugging Face hub, which must not change: copy it first")
    if not os.access(path, os.W_OK):
        raise UserError(f"--write: {file.path} is read-only: make it writable, or copy it")
    if not has_room(file):
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"--write: {file.path} has no room for more metadata and must be copied, but {path.parent} is read-only: move it")
        check_free_space(path.parent, file.n_bytes, f"--write: a copy of {file.path}", "", "move the file to another disk")


def write_first_keys(file: GGUFFile, entries: Sequence[KeyValue]) -> None:
    """Replace the entries of PREFIX by these, which become the first ones, in place if the file has room for them.

    Args:
        file: one file, no split model. It describes the old header afterwards: open the path again.
        entries: with keys of PREFIX; none removes what is recorded.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(os.path.realpath(file.path))
    try:
        group = _first_entries(file)
        n_bytes, new = len(entry_bytes(group)), entry_bytes(entries)
        if has_room(file) and n_bytes - len(new) >= ROOM_HEAD:
            with open_file(path) as f:
                _write_in_place(f, len(file.metadata) - len(group), [*entries, room_value(n_bytes - len(new))], n_bytes)
        else:
            _copy(file, path, entries)
    except OSError as e:
        raise UserError(f"--write: cannot write {path}: {e.strerror}; the model is intact") from e


def _write_in_place(f: BinaryIO, n_others: int, entries: Sequence[KeyValue], n_bytes: int) -> None:
    """Write entries of n_bytes in total to the beginning of the metadata. n_others: number of the other keys."""
    new, split = entry_bytes(entries), FIRST_AT + ROOM_HEAD

    def write_head(n_keys: int, head: bytes) -> None:
        f.seek(COUNT_AT)
        f.write(struct.pack("<Q", n_keys) + head)
        sync(f)

    write_head(n_others + 1, entry_bytes([room_value(n_bytes)])[:ROOM_HEAD])  # from here on, what follows is the content of an array
    f.seek(split)
    f.write(new[ROOM_HEAD:])
    sync(f)
    write_head(n_others + len(entries), new[:ROOM_HEAD])


def _copy(file: GGUFFile, path: Path, entries: Sequence[KeyValue]) -> None:
    """Replace the file by a copy with these first entries and room for others."""
    others = [kv for kv in file.metadata.values() if not kv.key.startswith(PREFIX)]
    start, block = pad(file.n_header, file.alignment), max(BLOCK, file.alignment)
    with write_atomically(path) as part, open(path, "rb") as source, open_file(part) as f:
        old = source.read(file.n_header)
        infos = old[FIRST_AT + len(entry_bytes(list(file.metadata.values()))) :]
        n_fixed = FIRST_AT + len(entry_bytes([*entries, *others])) + len(infos)
        new_start = start + pad(max(n_fixed + ROOM_BYTES - start, 0), block)
        keys = [*entries, room_value(new_start - n_fixed), *others]
        f.write(old[:COUNT_AT] + struct.pack("<Q", len(keys)) + entry_bytes(keys) + infos)
        f.flush()
        _copy_data(source, f, start, new_start, file.n_bytes - start)
        sync(f)
        file.check_unchanged()
        with contextlib.suppress(OSError):
            shutil.copymode(path, part)


def _copy_data(source: BinaryIO, out: BinaryIO, start: int, to: int, n_bytes: int) -> None:
    """Copy n_bytes from `start` to `to`. Some file systems share the data instead."""
    n_done = 0
    if sys.platform != "win32":
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or not on this drive
            while n_piece := os.copy_file_range(source.fileno(), out.fileno(), n_bytes - n_done, start + n_done, to + n_done):
                n_done += n_piece
    source.seek(start + n_done)
    out.seek(to + n_done)
    shutil.copyfileobj(source, out)
