"""The package itself: its directory, its version, and how to install its extras."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PACKAGE_DIR = Path(__file__).parents[1]

try:
    __version__ = metadata.version("ggml-ext")
except metadata.PackageNotFoundError:  # the source tree on PYTHONPATH
    __version__ = "0+uninstalled"


def install_command(extra: str, modules: Sequence[str]) -> str:
    """Return the command that installs an extra's requirements; if the package is not installed, that installs `modules`."""
    try:
        declared = metadata.requires("ggml-ext") or []
    except metadata.PackageNotFoundError:
        declared = []
    split = [requirement.partition(";") for requirement in declared]
    requirements = [name.strip() for name, _, marker in split if re.search(rf"extra\s*==\s*(['\"]){extra}\1", marker)]
    return f"pip install {shlex.join(requirements or modules)}"
