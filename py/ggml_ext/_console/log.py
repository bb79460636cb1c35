"""What the quantizer says: lines for people, or with --log-format json one JSON object a line on either stream."""

from __future__ import annotations

import datetime
import sys

from tqdm import tqdm

from .._base.encoding import shown, to_json
from .cli import print_text

FORMATS = ("text", "json")


class Log:
    """Notes, warnings and errors go to standard error, reports to standard output. format: one of FORMATS."""

    def __init__(self, format: str, quiet: bool, way_out: str):
        """quiet: neither notes nor reports. way_out: what to do if standard output cannot be written."""
        self.is_json, self.quiet, self._way_out = format == "json", quiet, way_out
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self._tell("warning", text)

    def note(self, text: str) -> None:
        if not self.quiet:
            self._tell("note", text)

    def error(self, text: str, trace: str | None = None) -> None:
        """trace: the traceback, to stand above the line or in the object."""
        self._tell("error", text, trace)

    def _tell(self, kind: str, text: str, trace: str | None = None) -> None:
        if self.is_json:
            line = self._object(kind, text=text, **({} if trace is None else {"traceback": trace}))
        else:
            line = f"{trace or ''}{kind}: {text}"
        tqdm.write(shown(line, sys.stderr), file=sys.stderr)

    def report(self, text: str) -> None:
        """For people alone."""
        if not (self.quiet or self.is_json):
            print_text(text, self._way_out)

    def event(self, kind: str, values: dict) -> None:
        """For programs alone."""
        if self.is_json and not self.quiet:
            print_text(self._object(kind, **values), self._way_out)

    @staticmethod
    def _object(kind: str, **values) -> str:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        return to_json({"time": now, "event": kind, **values})
