"""Speed of llama.cpp's matrix products on this machine, for time estimates."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from . import library as _lib
from .process import run_logged

N_EXPERTS = 4  # of the timed product
PROGRAM = Path(__file__).with_name("product_rate.py")


@functools.cache
def product_rate(type_id: int, n_threads: int, n_columns: int, is_expert: bool) -> float | None:
    """Measure, in about a second, the operations per second of a product of a matrix in a ggml type and columns of floats.

    is_expert: the matrix is one of a mixture of experts, whose products ggml computes by other code.

    A multiplication and an addition are two operations. None if libggml is missing or fails.
    """
    path = _lib.libggml_path()
    if path is None or not sys.executable:
        return None
    command = [sys.executable, "-I", PROGRAM, path, path.parent, type_id, n_columns, N_EXPERTS if is_expert else 1, n_threads]  # -I: as in count_tokens()
    code, log = run_logged([*map(str, command)], Path())
    match = re.search(r"^flops (\S+)$", log, re.M)
    return float(match[1]) if match and code == 0 else None
