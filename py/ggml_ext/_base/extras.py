"""What the extras of the package need, as commands that install it wherever the package itself came from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import metadata


def install_command(extra: str, modules: Sequence[str]) -> str:
    """The command that installs the requirements of an extra. modules: to name instead where the package was not installed."""
    try:
        declared = metadata.requires("ggml-ext") or []
    except metadata.PackageNotFoundError:  # the source tree on PYTHONPATH
        declared = []
    split = [requirement.partition(";") for requirement in declared]
    found = [what.strip() for what, _, marker in split if re.search(rf"extra\s*==\s*(['\"]){extra}\1", marker)]
    return f"pip install {shlex.join(found or modules)}"
