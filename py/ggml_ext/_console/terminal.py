"""What the programs say on both streams: lines for people, or with --log-format json one JSON object a line."""

from __future__ import annotations

import datetime
import sys

from tqdm import tqdm

from .._base.console import Bar, Console
from .._base.encoding import escape_for, to_json
from .cli import print_text

FORMATS = ("text", "json")


class Terminal(Console):
    """Notes, warnings and errors go to standard error, reports to standard output. format: one of FORMATS."""

    is_terminal = True

    def __init__(self, way_out: str, format: str = FORMATS[0], quiet: bool = False, details: bool = True, progress: bool = False):
        """way_out: what to do if standard output cannot be written; progress: bars even where standard error is no terminal."""
        super().__init__()
        self.is_json, self.quiet, self.details, self._way_out = format == "json", quiet, details and not quiet, way_out
        self._shows_bars = not (quiet or self.is_json) and sys.stderr is not None and (progress or sys.stderr.isatty())

    def error(self, text: str, trace: str | None = None) -> None:
        """trace: the traceback, to stand above the line or in the object."""
        self.tell("error", text, trace)

    def tell(self, kind: str, text: str, trace: str | None = None) -> None:
        if self.is_json:
            line = self._object(kind, text=text, **({} if trace is None else {"traceback": trace}))
        else:
            line = f"{trace or ''}{kind}: {text}"
        tqdm.write(escape_for(line, sys.stderr), file=sys.stderr)

    def report(self, text: str) -> None:
        if not (self.quiet or self.is_json):
            print_text(text, self._way_out)

    def event(self, kind: str, values: dict) -> None:
        if self.is_json and not self.quiet:
            print_text(self._object(kind, **values), self._way_out)

    def bar(self, title: str, total: float | None, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        return tqdm(total=total, desc=title, unit=unit, unit_scale=is_scaled, initial=done, disable=not self._shows_bars)

    @staticmethod
    def _object(kind: str, **values) -> str:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        return to_json({"time": now, "event": kind, **values})
