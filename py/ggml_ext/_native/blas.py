"""numpy's products without threads of their own: the programs start as many as -t says, and each of those calls BLAS.

OpenBLAS starts one for each processor when it is loaded, whatever -t says, and they spin while they wait for each other and for
processors. Errors of 6 matrices of 1024 x 1536 in 10 types, weighted with second moments of blocks, -t 2, on two processors with other
programs: 33.3 s of processor time with two of them, 5.3 s with one (numpy 2.4.6, Zen 3). Sums would depend on their number, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


def openblas_threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Functions that return and set the number of threads of numpy's OpenBLAS; None where it has another BLAS, or hides it."""
    with contextlib.suppress(AttributeError, OSError):
        dll = ctypes.CDLL(np.linalg._umath_linalg.__file__)  # names are looked for in what it is linked with, too
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            if hasattr(dll, f"{prefix}openblas_set_num_threads{suffix}"):
                return tuple(getattr(dll, f"{prefix}openblas_{what}_num_threads{suffix}") for what in ("get", "set"))
    return None


@dataclass
class _Held:
    """Programs of this process that hold the number at one, and what it was before the first of them."""

    lock: threading.Lock
    n_programs: int = 0
    before: int = 0


_held = _Held(threading.Lock())


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it numpy's products run in the thread that asks for them; the number of before is set again at its end, where programs
    run in several threads at that of the last."""
    found = openblas_threads()
    if found is None:
        yield
        return
    get_number, set_number = found
    with _held.lock:
        if not _held.n_programs:
            _held.before = get_number()
            set_number(1)
        _held.n_programs += 1
    try:
        yield
    finally:
        with _held.lock:
            _held.n_programs -= 1
            if not _held.n_programs:
                set_number(_held.before)
