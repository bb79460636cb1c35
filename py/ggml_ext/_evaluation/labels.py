"""How the models of a table are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def labels(paths: Sequence[Path]) -> list[str]:
    """Names of files where they differ, else whole paths."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
