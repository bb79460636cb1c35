"""Limits numpy's BLAS to one thread, because the callers are threads themselves.

OpenBLAS starts a thread per core when it is loaded. They spin while they wait, which costs up to six times the CPU time when other
programs run, and the order of sums would depend on their number.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


def openblas_threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return the functions that get and set the thread count of numpy's OpenBLAS; None if numpy uses another BLAS or hides it."""
    with contextlib.suppress(AttributeError, OSError):
        dll = ctypes.CDLL(np.linalg._umath_linalg.__file__)  # symbols of linked libraries are found too
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            if hasattr(dll, f"{prefix}openblas_set_num_threads{suffix}"):
                return getattr(dll, f"{prefix}openblas_get_num_threads{suffix}"), getattr(dll, f"{prefix}openblas_set_num_threads{suffix}")
    return None


@dataclass
class _Hold:
    """The uses of one_blas_thread() that are active in this process, and the thread count before the first of them."""

    lock: threading.Lock
    n_users: int = 0
    previous: int = 0


_hold = _Hold(threading.Lock())


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run numpy's products in the calling thread. When the last of several concurrent uses ends, the old thread count is restored."""
    functions = openblas_threads()
    if functions is None:
        yield
        return
    get_number, set_number = functions
    with _hold.lock:
        if not _hold.n_users:
            _hold.previous = get_number()
            set_number(1)
        _hold.n_users += 1
    try:
        yield
    finally:
        with _hold.lock:
            _hold.n_users -= 1
            if not _hold.n_users:
                set_number(_hold.previous)
