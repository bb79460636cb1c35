"""How the models of a table are called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def labels(paths: Sequence[Path]) -> list[str]:
    """Names of files where they differ, else their paths below the folder that holds them all. A path that is there twice has one."""
    names = [path.name for path in paths]
    if len(set(names)) == len(set(paths)):
        return names
    whole = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(whole)
    return [os.path.relpath(path, common) if path != common else os.path.basename(path) for path in whole]
