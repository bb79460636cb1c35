"""Signals that end a run: raised as an exception while files are written, held back while a program starts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopRequest(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def can_set_handlers() -> bool:
    """False in all threads but the main one: Python lets that one alone set handlers, and they are the business of the program
    whose thread it is."""
    return threading.current_thread() is threading.main_thread()


class _Stop:
    """The handler of stop_on_signals()."""

    def __call__(self, number: int, _frame: object) -> None:
        ignore_signals()  # cleaning up takes a moment and must not be cut short
        raise StopRequest(number)


def ignore_signals() -> None:
    """Until stop_on_signals() ends. Outside of it nothing: a program that calls the API keeps its own handlers."""
    for n in SIGNALS if can_set_handlers() else []:
        if isinstance(signal.getsignal(n), _Stop):
            signal.signal(n, signal.SIG_IGN)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within it SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread; once is enough. In another thread they stay as they
    are."""
    # None: a handler that is not Python's, which could not be set again
    wanted = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)] if can_set_handlers() else []
    previous = {n: signal.signal(n, _Stop()) for n in wanted}
    try:
        yield
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Within it the signals of stop_on_signals() wait for its end. In another thread they stay as they are."""
    came: list[int] = []
    handlers = {n: h for n in SIGNALS if can_set_handlers() and callable(h := signal.getsignal(n))}
    for n in handlers:
        signal.signal(n, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
        if came:
            signal.raise_signal(came[0])
