"""Text for the terminal: widths, tables, durations."""

from __future__ import annotations

import shutil
import sys

MIN_COLUMNS = 80


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def terminal_width() -> int:
    """Return the number of columns of standard output's terminal, or MIN_COLUMNS."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(MIN_COLUMNS, shutil.get_terminal_size().columns) if is_terminal else MIN_COLUMNS


def format_table(title: str, heading: str, rows: list[tuple[str, str]], width: int) -> list[str]:
    """Return an empty line and the lines of a table with a column of names.

    Args:
        title: heading of the names.
        heading: heading of the other columns.
        rows: names, shortened to fit, and the text of the other columns.
        width: columns of the terminal.
    """
    max_name = width - len(heading) - 2
    rows = [(shorten(name, max_name), text) for name, text in [(title, heading), *rows]]
    name_width = max(len(name) for name, _ in rows)
    return ["", *(f"{name:<{name_width}}  {text}" for name, text in rows)]


def shorten(text: str, width: int) -> str:
    """Cut the middle out of text with more than `width` characters."""
    if len(text) <= width:
        return text
    n = max(width - 2, 2)
    return f"{text[: n - n // 2]}..{text[len(text) - n // 2 :]}"
