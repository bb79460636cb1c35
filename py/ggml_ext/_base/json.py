"""JSON files that an earlier run wrote and that anyone may have changed since."""

from __future__ import annotations

import json
import sys
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. ValueError also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def is_number(value: object) -> bool:
    """Return whether the value is a finite int or float; bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
