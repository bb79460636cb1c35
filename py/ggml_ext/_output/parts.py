"""The files that OUT consists of: one, or the parts of a split model, and their names."""

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
from .._formats.split import COUNT_KEY, NUMBER_KEY, TENSORS_KEY, part_name


def parse_split_size(text: str) -> int:
    """Bytes of N(M|G), powers of ten as in llama-gguf-split. UserError for anything else."""
    found = re.fullmatch(r"([0-9]{1,9})([MG])", text)
    if not found or not int(found[1]):
        raise UserError(f"--split-max-size: got {text!r}, must be a number above 0 and M (1,000,000 bytes) or G, such as 2G")
    return int(found[1]) * 10 ** {"M": 6, "G": 9}[found[2]]


@dataclass(frozen=True)
class Part:
    """A file that is made: its name in the end, and its tensors first..last-1 of the model's."""

    path: Path
    first: int
    last: int

    @property
    def partial(self) -> Path:
        return partial_path(self.path)

    @property
    def replaced(self) -> Path:
        """The name of the file that it replaces, until all parts have their names."""
        return self.partial.with_suffix(".replaced")


def split_parts(path: Path, sizes: Sequence[int], max_bytes: int | None) -> list[Part]:
    """Which tensors go into which file. sizes: bytes of each tensor, padded. max_bytes: of the tensors of a file, None for one
    file with the name `path`. A tensor that is larger has a file of its own.

    Rule: llama.cpp, tools/gguf-split, which counts no metadata either.
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


def part_metadata(metadata: dict[str, KeyValue], parts: list[Part], n: int) -> dict[str, KeyValue]:
    """Keys of part n of a split model: all in the first, in the others those that its loader needs."""
    ours = [uint16_value(NUMBER_KEY, n), uint16_value(COUNT_KEY, len(parts)), int32_value(TENSORS_KEY, parts[-1].last)]
    kept = metadata if n == 0 else {k: kv for k, kv in metadata.items() if k == "general.alignment"}
    return kept | {kv.key: kv for kv in ours}


def take_back(part: Part) -> None:
    """Undoes that a part was given its name. Without hard links, and with force, the partial file itself got it."""
    if os.path.lexists(part.partial):
        part.path.unlink()
    else:
        os.replace(part.path, part.partial)


def keep_mode(part: Part) -> None:
    """A file that is replaced leaves its permissions to the new one."""
    with contextlib.suppress(OSError):
        os.chmod(part.partial, stat.S_IMODE(os.stat(part.path).st_mode))
