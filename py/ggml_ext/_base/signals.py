"""Signals that end a run: raised as an exception while files are written, deferred while a program starts."""

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
        self.state: str | None = None  # of the output, if the command has written it


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def can_set_handlers() -> bool:
    """Return whether this is the main thread, the only one in which Python can set signal handlers."""
    return threading.current_thread() is threading.main_thread()


class _StopHandler:
    """The handler of stop_on_signals()."""

    def __call__(self, number: int, _frame: object) -> None:
        ignore_signals()  # a second signal must not interrupt the clean-up
        raise StopRequest(number)


class _IgnoringHandler:
    """The handler of ignore_signals()."""

    def __call__(self, number: int, _frame: object) -> None:
        pass


def ignore_signals() -> None:
    """Ignore further signals until stop_on_signals() ends. A program that calls the API keeps its own handlers."""
    for n in SIGNALS if can_set_handlers() else []:
        if isinstance(signal.getsignal(n), _StopHandler):
            signal.signal(n, _IgnoringHandler())


def heed_signals() -> list[int]:
    """Raise StopRequest for signals again after ignore_signals(). Return the signals that were ignored."""
    ignored = [n for n in SIGNALS if isinstance(signal.getsignal(n), _IgnoringHandler)] if can_set_handlers() else []
    for n in ignored:
        signal.signal(n, _StopHandler())
    return ignored


@contextlib.contextmanager
def stop_after_writing(state: str | None) -> Iterator[None]:
    """Heed signals in the block. state: of the written output, for the message; None if there is none yet."""
    ignored = heed_signals()
    try:
        yield
    except StopRequest as e:
        e.state = state
        vars(e).pop("kept", None)  # a description of other, temporary files
        raise
    finally:
        for n in ignored:
            signal.signal(n, _IgnoringHandler())


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StopRequest for the first SIGINT, SIGTERM or SIGHUP. Outside the main thread this does nothing."""
    # None: a handler that Python did not set and could not restore
    replaced = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)] if can_set_handlers() else []
    previous = {n: signal.signal(n, _StopHandler()) for n in replaced}
    try:
        yield
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Deliver the signals of stop_on_signals() at the end of the block. Outside the main thread this does nothing."""
    received: list[int] = []
    handlers = {n: h for n in SIGNALS if can_set_handlers() and callable(h := signal.getsignal(n))}
    for n in handlers:
        signal.signal(n, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)
        if received:
            signal.raise_signal(received[0])
