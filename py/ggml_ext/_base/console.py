"""Output of a run behind one interface: notes, warnings, reports, events for programs and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Bar(Protocol):
    """A progress bar with tqdm's interface. As a context manager, it closes itself."""

    n: float
    total: float | None

    def __enter__(self) -> Bar: ...

    def __exit__(self, *error: object) -> None: ...

    def update(self, n: float = 1) -> object: ...


class Counter:
    """A bar without display. on_update(n, total) is called after every step."""

    def __init__(self, total: float | None, done: float = 0, on_update: Callable[[float, float | None], None] | None = None):
        self.total, self.n, self._on_update = total, done, on_update

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        self.n += n
        if self._on_update is not None:
            self._on_update(self.n, self.total)


class Console:
    """A silent console that collects warnings; the base class of the terminal's and the API's.

    Attributes:
        quiet: suppress notes and reports.
        details: print a line for each tensor.
        is_terminal: libraries may draw their own bars.
    """

    quiet = False
    details = False
    is_terminal = False

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        if not self.quiet:
            self.tell("note", text)

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.tell("warning", text)

    def tell(self, kind: str, text: str) -> None:
        """Print one line. kind: "note" or "warning"."""

    def report(self, text: str) -> None:
        """Print results for people."""

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Print results for programs."""

    def bar(self, title: str, total: float | None, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        """Open a progress bar.

        Args:
            title: name of the phase.
            total: number of units; None if it is not known yet.
            unit: name of one unit.
            is_scaled: show numbers with k, M and G.
            done: units that an earlier run completed.
        """
        return Counter(total, done)


class BarsOnly(Console):
    """A console that shows the progress bars of another one and nothing else."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def bar(self, title: str, total: float | None, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        return self._console.bar(title, total, unit, is_scaled, done)


class Callbacks(Console):
    """A console that calls log(kind, line) and progress(title, n, total)."""

    def __init__(self, log: Callable[[str, str], None] | None, progress: Callable[[str, float, float | None], None] | None):
        super().__init__()
        self._log, self._progress = log, progress

    def tell(self, kind: str, text: str) -> None:
        if self._log is not None:
            self._log(kind, text)

    def bar(self, title: str, total: float | None, unit: str, is_scaled: bool = False, done: float = 0) -> Bar:
        progress = self._progress
        return Counter(total, done, None if progress is None else lambda n, n_all: progress(title, n, n_all))
