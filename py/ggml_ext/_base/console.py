"""What a run says, and to whom: notes, warnings, reports, events for programs and progress bars, behind one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Bar(Protocol):
    """A progress bar; tqdm's has this form. Used as a context, it ends with it."""

    n: float
    total: float | None

    def __enter__(self) -> Bar: ...

    def __exit__(self, *error) -> None: ...

    def update(self, n: float = 1) -> object: ...


class Counter:
    """A bar that nobody sees. heard: called with what is done and the total, whenever that changes."""

    def __init__(self, total: float | None, done: float = 0, heard: Callable[[float, float | None], None] | None = None):
        self.total, self.n, self._heard = total, done, heard

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *error) -> None:
        pass

    def update(self, n: float = 1) -> None:
        self.n += n
        if self._heard is not None:
            self._heard(self.n, self.total)


class Console:
    """Says nothing, and collects the warnings. The base of those that speak: of a terminal, of a program's callbacks.

    quiet: neither notes nor reports are wanted; details: a line for each tensor is; is_terminal: libraries may write there too.
    """

    quiet = False
    details = False
    is_terminal = False

    def __init__(self):
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        if not self.quiet:
            self.tell("note", text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.tell("warning", text)

    def tell(self, kind: str, text: str) -> None:
        """One line. kind: "note" or "warning"."""

    def report(self, text: str) -> None:
        """What a run found and did, for people alone."""

    def event(self, kind: str, values: dict) -> None:
        """The same for programs alone."""

    def bar(self, title: str, total: float, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        """title: of the phase; is_scaled: numbers are shown with k, M and G; done: what was done before."""
        return Counter(total, done)


class Callbacks(Console):
    """Hands everything to functions. log: gets "note" or "warning" and the line; progress: gets a phase's title, what is done of it
    and the total."""

    def __init__(self, log: Callable[[str, str], None] | None, progress: Callable[[str, float, float | None], None] | None):
        super().__init__()
        self._log, self._progress = log, progress

    def tell(self, kind: str, text: str) -> None:
        if self._log is not None:
            self._log(kind, text)

    def bar(self, title: str, total: float, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        if self._progress is None:
            return Counter(total, done)
        return Counter(total, done, lambda n, of: self._progress(title, n, of))
