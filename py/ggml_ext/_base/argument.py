"""Names of files as other programs take them."""

from __future__ import annotations


def as_argument(name: str) -> str:
    """The name of a file in the current folder, or its path, as a word of a command line that no program takes for an option."""
    return f"./{name}" if name.startswith("-") else name
