"""File names inside text. Python represents bytes of a name that the locale cannot decode as lone surrogates; in an ASCII locale
those are all bytes above 127."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO


def to_utf8(text: str) -> str:
    """Replace surrogates by the characters that they encode; bytes that are not UTF-8 become \\xff."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a surrogate of UTF-16, as in Windows' names
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_file_name(text: str) -> str:
    """Return the file name whose bytes are the text's UTF-8, in any locale: the inverse of to_utf8()."""
    return text if os.name == "nt" else os.fsdecode(text.encode())


def to_argument(name: str) -> str:
    """Return a path as a word of a command line that no program takes for an option."""
    return f"./{name}" if name.startswith("-") else name


def escape_for(text: str, stream: TextIO) -> str:
    """Convert text to UTF-8 and escape characters that the stream's encoding lacks, as \\u20ac."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return to_utf8(text).encode(encoding, "backslashreplace").decode(encoding)


def to_json(value: Any, indent: int | None = None) -> str:
    """Serialize dicts, lists and scalars to JSON, with all text converted by to_utf8()."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return to_utf8(value)
        if isinstance(value, dict):
            return {clean(k): clean(v) for k, v in value.items()}
        return [clean(v) for v in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(clean(value), indent=indent)
