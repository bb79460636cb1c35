"""Names and sizes of the models in a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .._formats.gguf_file import GGUFFile


def label_models(paths: Sequence[Path]) -> list[str]:
    """Return the file names if they are unique, else the paths relative to the common directory. Equal paths have equal labels."""
    names = [path.name for path in paths]
    if len(set(names)) == len(set(paths)):
        return names
    absolute = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(absolute)
    return [os.path.relpath(path, common) if path != common else os.path.basename(path) for path in absolute]


def model_bpw(file: GGUFFile) -> float:
    """Return the bits per weight over all tensors."""
    return 8 * sum(t.n_bytes for t in file.tensors) / max(sum(t.n_elements for t in file.tensors), 1)


def disk_bytes(file: GGUFFile) -> int:
    """Return the size of the file, with all parts."""
    return sum(part.path.stat().st_size for part in file.parts)
