"""How the models of a table are called, and how large they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .._formats.gguf_file import GGUFFile


def label_models(paths: Sequence[Path]) -> list[str]:
    """Names of files where they differ, else their paths below the folder that holds them all. A path that is there twice has one."""
    names = [path.name for path in paths]
    if len(set(names)) == len(set(paths)):
        return names
    whole = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(whole)
    return [os.path.relpath(path, common) if path != common else os.path.basename(path) for path in whole]


def model_bpw(file: GGUFFile) -> float:
    """Bits a weight of all tensors."""
    return 8 * sum(t.n_bytes for t in file.tensors) / max(sum(t.n_elements for t in file.tensors), 1)


def disk_bytes(file: GGUFFile) -> int:
    """Of all parts."""
    return sum(part.path.stat().st_size for part in file.parts)
