"""JSON from files that the programs keep, and that anyone may have changed since."""

from __future__ import annotations

import json
import sys


def parse_json(text: str | bytes):
    """ValueError for what is no JSON, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def is_number(value) -> bool:
    """True for what can be reckoned with as a float: no text, no truth value, finite."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
