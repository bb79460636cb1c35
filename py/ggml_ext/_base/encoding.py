"""Text in which names of files stand, as files and terminals take it.

Names are bytes. Python holds those that are no text of the locale's encoding as lone surrogates: in a locale of ASCII all beyond it.
"""

from __future__ import annotations

import json
import os
from typing import Any, TextIO


def to_utf8(text: str) -> str:
    """The text with the characters that its surrogates stand for; bytes that are no UTF-8 become \\xff."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a surrogate of UTF-16, as in Windows' names
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_file_name(text: str) -> str:
    """The opposite: a name of a file that has the text's bytes in UTF-8, whatever the locale."""
    return text if os.name == "nt" else os.fsdecode(text.encode())


def escape_for(text: str, stream: TextIO) -> str:
    """utf8() with \\u20ac and the like for what the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return to_utf8(text).encode(encoding, "backslashreplace").decode(encoding)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON of dicts, lists and scalars, all of whose text is as to_utf8() makes it."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return to_utf8(value)
        if isinstance(value, dict):
            return {clean(k): clean(v) for k, v in value.items()}
        return [clean(v) for v in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(clean(value), indent=indent)


def to_argument(name: str) -> str:
    """Return a path as a word of a command line that no program takes for an option."""
    return f"./{name}" if name.startswith("-") else name
