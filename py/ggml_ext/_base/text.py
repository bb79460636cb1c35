"""Lines for the terminal: widths, tables, durations."""

from __future__ import annotations

import shutil
import sys


def format_duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


MIN_COLUMNS = 80


def terminal_width() -> int:
    """Width of what standard output is shown on."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(MIN_COLUMNS, shutil.get_terminal_size().columns) if is_terminal else MIN_COLUMNS


def format_table(title: str, heading: str, rows: list[tuple[str, str]], width: int) -> list[str]:
    """Lines of a name, shortened to what the other columns leave, and those."""
    room = width - len(heading) - 2
    rows = [(shorten(name, room), others) for name, others in [(title, heading), *rows]]
    name_width = max(len(name) for name, _ in rows)
    return ["", *(f"{name:<{name_width}}  {others}" for name, others in rows)]


def shorten(text: str, width: int) -> str:
    """text in at most width characters, the middle left out."""
    if len(text) <= width:
        return text
    kept = max(width - 2, 2)
    return f"{text[: kept - kept // 2]}..{text[len(text) - kept // 2 :]}"
