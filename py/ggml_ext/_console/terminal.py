"""Print messages as text or, with --log-format json, as one JSON object per line."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from .._base.console import Bar, Console
from .._base.encoding import escape_for, to_json
from .._base.option import option
from .cli import print_text

FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class QuietOptions:
    """Output options of short commands."""

    quiet: bool = option(False, short="-q", help="print errors and warnings only")


@dataclass(frozen=True, kw_only=True)
class TerminalOptions:
    """Output options of commands that write a model."""

    progress: bool = option(False, help="show the progress bar even if stderr is not a terminal")
    summary: bool = option(False, help="print warnings and the summary, without a line per tensor")
    quiet: bool = option(False, short="-q", help="print errors and warnings only, without those about fallbacks")


@dataclass(frozen=True, kw_only=True)
class FormatOptions(TerminalOptions):
    """Output options of quantize."""

    log_format: str = option(FORMATS[0], choices=FORMATS, help="json: one JSON object per line on both streams (default: text)")


class Terminal(Console):
    """A console that prints notes, warnings and errors to standard error and reports to standard output."""

    is_terminal = True

    def __init__(self, format: str = FORMATS[0], quiet: bool = False, details: bool = True, progress: bool = False):
        """format: of FORMATS; progress: show bars even if standard error is not a terminal."""
        super().__init__()
        self.is_json, self.quiet, self.details = format == "json", quiet, details and not quiet
        self._shows_bars = not (quiet or self.is_json) and sys.stderr is not None and (progress or sys.stderr.isatty())

    def error(self, text: str, trace: str | None = None) -> None:
        """Print an error. trace: its traceback, printed above the line or added to the object."""
        self.tell("error", text, trace)

    def tell(self, kind: str, text: str, trace: str | None = None) -> None:
        if self.is_json:
            line = self._object(kind, text=text, **({} if trace is None else {"traceback": trace}))
        else:
            line = f"{trace or ''}{kind}: {text}"
        tqdm.write(escape_for(line, sys.stderr), file=sys.stderr)

    def report(self, text: str) -> None:
        if not (self.quiet or self.is_json):
            print_text(text)

    def event(self, kind: str, values: dict) -> None:
        if self.is_json and not self.quiet:
            print_text(self._object(kind, **values))

    def bar(self, title: str, total: float | None, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        return tqdm(total=total, desc=title, unit=unit, unit_scale=is_scaled, initial=done, disable=not self._shows_bars)

    @staticmethod
    def _object(kind: str, **values: Any) -> str:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        return to_json({"time": now, "event": kind, **values})
