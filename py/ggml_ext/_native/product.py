"""How fast llama.cpp multiplies matrices on this machine, for estimates."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from . import library as _lib
from .process import run_logged

PROGRAM = Path(__file__).with_name("product_rate.py")


@functools.cache
def product_rate(type_id: int, n_threads: int) -> float | None:
    """Operations (two for a product and a sum) a second of a matrix in a type of ggml times 512 columns of floats; None where libggml is
    not there, or does not say. Takes about a second."""
    path = _lib.libggml_path()
    if path is None or not sys.executable:
        return None
    command = [sys.executable, "-I", PROGRAM, path, path.parent, type_id, n_threads]  # -I: as in count_tokens()
    code, log = run_logged([*map(str, command)], Path())
    found = re.search(r"^flops (\S+)$", log, re.M)
    return float(found[1]) if found and code == 0 else None
