"""Names of the files that a run caches next to OUT for the next one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from .._base.errors import UserError

PASS_NAME = re.compile(r"(.+)\.layers-(\d+)-(\d+)\.gguf")


def imatrix_cache_name(stem: str, layers: Sequence[int] | None = None) -> str:
    """Return the name of a model's cached imatrix. layers: those that it covers, None for all."""
    return f"{stem}.imatrix{'' if layers is None else f'.layers-{layers[0]}-{layers[-1]}'}.gguf"


def find_passes(path: Path) -> list[Path]:
    """Return the files of all passes over layers that a file belongs to, in the order of their layers, or the file alone.

    Raises:
        UserError: two of them have the same layer.
    """
    match = PASS_NAME.fullmatch(path.name)
    if not match:
        return [path]
    others = [(int(m[2]), int(m[3]), p) for p in path.parent.iterdir() if (m := PASS_NAME.fullmatch(p.name)) and m[1] == match[1]]
    passes = sorted(others)
    for (_, last, one), (first, _, other) in pairwise(passes):
        if first <= last:
            raise UserError(f"{one} and {other} have the Hessians of the same layers: move the files of the older calibration away")
    return [p for _, _, p in passes] or [path]


def logits_cache_name(stem: str) -> str:
    """Return the name of a model's cached logits."""
    return f"{stem}.logits.bin"


def choice_cache_name(stem: str) -> str:
    """Return the name of a model's cached sensitivities."""
    return f"{stem}.choice.json"
