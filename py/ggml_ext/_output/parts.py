"""The parts of an output: their names, tensors and metadata."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .._base.files import partial_path
from .._formats.gguf_file import KeyValue, int32_value, uint16_value
from .._formats.split import COUNT_KEY, MAX_PARTS, NUMBER_KEY, PARTS_KEY, TENSORS_KEY, part_name


def parse_split_size(text: str) -> int:
    """Parse N(M|G) to bytes; M and G are powers of ten as in llama-gguf-split."""
    match = re.fullmatch(r"([0-9]{1,9})([MG])", text)
    if not match or not int(match[1]):
        raise UserError(f"--split-max-size: got {text!r}, must be a number above 0 and M (1,000,000 bytes) or G, such as 2G")
    return int(match[1]) * 10 ** {"M": 6, "G": 9}[match[2]]


@dataclass(frozen=True)
class PartNumber:
    """The value I/N of --part: which part of a split model a run writes."""

    number: int  # from 1
    count: int

    @classmethod
    def parse(cls, text: str) -> PartNumber:
        """Parse I/N. Raise UserError if it is malformed or out of range."""
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]) <= MAX_PARTS:
            raise UserError(f"--part: got {text!r}, must be I/N with I from 1 to N and N up to {MAX_PARTS:,}, such as 2/5")
        return cls(int(match[1]), int(match[2]))

    def path(self, model: Path) -> Path:
        """Return the path of the part. model: OUT."""
        return model.with_name(part_name(model.name.removesuffix(".gguf"), self.number, self.count))


@dataclass(frozen=True)
class Part:
    """An output file: its final path, and the range first..last-1 of its tensors."""

    path: Path
    first: int
    last: int

    @property
    def partial(self) -> Path:
        return partial_path(self.path)

    @property
    def replaced(self) -> Path:
        """Temporary name of the file that it replaces, until all parts are renamed."""
        return self.partial.with_suffix(".replaced")


def split_parts(path: Path, sizes: Sequence[int], max_bytes: int | None) -> list[Part]:
    """Assign tensors to files as llama-gguf-split does, which ignores the size of metadata. A larger tensor gets its own file.

    path: of the model; sizes: padded bytes of each tensor; max_bytes: of the tensors in a file, None for one file.
    """
    if max_bytes is None:
        return [Part(path, 0, len(sizes))]
    starts, size = [0], 0
    for i, n_bytes in enumerate(sizes):
        size += n_bytes
        if size > max_bytes and i > starts[-1]:
            starts.append(i)
            size = n_bytes
    prefix = path.name.removesuffix(".gguf")
    ends = [*starts[1:], len(sizes)]
    return [
        Part(path.with_name(part_name(prefix, n, len(starts))), first, last)
        for n, (first, last) in enumerate(zip(starts, ends, strict=True), 1)
    ]


def part_metadata(metadata: dict[str, KeyValue], part: PartNumber, n_tensors: int) -> dict[str, KeyValue]:
    """Return the metadata of a part: all in the first one; in the others what the loader and --part need.

    metadata: of the model; n_tensors: in all parts.
    """
    part_keys = [uint16_value(NUMBER_KEY, part.number - 1), uint16_value(COUNT_KEY, part.count), int32_value(TENSORS_KEY, n_tensors)]
    shared = metadata if part.number == 1 else {k: kv for k, kv in metadata.items() if k in ("general.alignment", PARTS_KEY)}
    return shared | {kv.key: kv for kv in part_keys}


def take_back(part: Part) -> None:
    """Undo the rename of a part. Where it was a hard link, the partial file still exists."""
    if os.path.lexists(part.partial):
        part.path.unlink()
    else:
        os.replace(part.path, part.partial)


def keep_mode(part: Part) -> None:
    """Copy the permissions of the file that a part replaces."""
    with contextlib.suppress(OSError):
        os.chmod(part.partial, stat.S_IMODE(os.stat(part.path).st_mode))
