"""Mistakes put into the compiled kernels on purpose: the checks of test_ptx_products.py and test_ptx_others.py notice them.

Each is an edit of one kernel's PTX. What notices it is part of the table: `fault`, where a GPU may stop too; `problem`, what may give right
results on a GPU by luck; `result`, a product that is not within its bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from helpers.cuda_host import DST, decoded
from helpers.ptx_products import BY_DESIGN, Bench, columns_of, exact, exact_in_tiles, inputs, weights
from ptx.memory import Fault


@dataclass(frozen=True)
class Mutation:
    """The nth match of `pattern` in kernels whose mangled name has `kernel` becomes `replacement`."""
    kernel: str
    what: str
    pattern: str
    replacement: str | Callable
    noticed: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.kernel}-{self.what}".replace(" ", "-")

    def apply(self, text: str) -> str:
        parts = re.split(r"(?m)^(?=\.(?:visible |weak )?\.?entry|\.entry)", text)
        return "".join(self.edit(part) if self.kernel in part.split("(")[0] else part for part in parts)

    def edit(self, kernel: str) -> str:
        places = list(re.finditer(self.pattern, kernel))
        if len(places) <= self.nth:  # a kernel of another shape, which is not launched: a test fails if that was the one
            return kernel
        at = places[self.nth]
        return kernel[:at.start()] + (self.replacement(at) if callable(self.replacement) else at.expand(self.replacement)) + kernel[at.end():]


# of a load: its register and address; of a shuffle: all that comes before the distance of lanes
LOAD, SHUFFLE = r"({}\s+%\w+), \[(%rd\d+)\]", r"(shfl\.sync\.bfly\.b32\s+%r\d+\|%p\d+, %r\d+), %?\w+"
TWO_BYTES_OFF = r"\1, [\2+2]"
WEIGHTS = LOAD.replace(r"\s+", " ").format(r"ld\.global\.nc\.u32")  # of __ldg(): what nvcc itself makes has a tab
INPUTS = LOAD.format(r"ld\.global\.[uf]32")
BARRIER, WAIT = r"bar\.sync\s+0;", r"griddepcontrol\.wait;"

VECTORS = [
    Mutation("mul_mat_vec_q", "no barrier", BARRIER, "", "problem"),
    Mutation("mul_mat_vec_q", "weights two bytes off", WEIGHTS, TWO_BYTES_OFF, "fault"),
    Mutation("mul_mat_vec_q", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("mul_mat_vec_q", "another thread's scale", r"\+256\]", "+260]", "result"),
    Mutation("mul_mat_vec_q", "no wait", WAIT, "", "problem"),
    Mutation("quantize_q8", "inputs two bytes off", INPUTS, TWO_BYTES_OFF, "fault"),
    Mutation("quantize_q8", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("quantize_q8", "another thread's scale", r"(st\.global\.u32\s+\[%rd\d+)\+256\]", r"\1+260]", "problem"),  # two write one place
    Mutation("quantize_q8", "no wait", WAIT, "", "problem"),
]
TILES = [
    # those before the 3rd are of experts, and of a tile's columns, which others behind them order too
    *(Mutation("mul_mat_q", f"no barrier {nth}", BARRIER, "", "problem", nth) for nth in (3, 4, 5, 6)),
    Mutation("mul_mat_q", "weights two bytes off", WEIGHTS, TWO_BYTES_OFF, "fault"),
    Mutation("mul_mat_q", "rows of another lane", LOAD.format(r"ldmatrix\S+").replace(r"%\w+", r"\{.*?\}"), r"\1, [\2+16]", "result"),
    Mutation("mul_mat_q", "the scale of another block", r"(ld\.shared\.f32\s+%\w+), \[(%r\d+)\+(\d+)\]", lambda m: f"{m[1]}, [{m[2]}+{int(m[3]) + 4}]", "result"),
    Mutation("mul_mat_q_stream_k_fixup", "another row's sum", LOAD.format(r"ld\.global\.nc\.f32"), r"\1, [\2+4]", "result"),
    Mutation("quantize_rotated_mmq", "inputs two bytes off", INPUTS, TWO_BYTES_OFF, "fault"),
    Mutation("quantize_rotated_mmq", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("quantize_rotated_mmq", "no wait", WAIT, "", "problem"),
]
ROWS = [
    Mutation("dequantize_rows", "weights two bytes off", WEIGHTS, TWO_BYTES_OFF, "fault"),
    Mutation("dequantize_rows", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("dequantize_rows", "no wait", WAIT, "", "problem"),
]


def judge(bench: Bench, run, right, allowed=frozenset()) -> str:
    """What notices a mistake: run() computes, right(result) says whether it is right."""
    try:
        result = run()
    except Fault:
        return "fault"
    if set(bench.device.problems()) - allowed:
        return "problem"
    return "nothing" if right(result) else "result"


def product(lib, name: str, mutation: Mutation | None, n_rows: int, n: int, run, bound, allowed=frozenset()) -> str:
    """run: the product, of (bench, weights, inputs); bound: what it should be and how far it may be off, as `exact` says."""
    w, x = weights(lib, name, n_rows, columns_of(name)), inputs(n, columns_of(name))
    bench = Bench(name, "90", mutate=mutation and mutation.apply)

    def right(got):
        y = bench.activations(w, n)
        try:
            y.check(lib, name, x)
        except AssertionError:
            return False
        want, most = bound(w, 0, y)
        return bool((np.abs(got - want) <= most).all())
    return judge(bench, lambda: run(bench, w, x), right, allowed)


def vectors(lib, name: str, mutation: Mutation | None) -> str:
    return product(lib, name, mutation, 36, 1, Bench.vectors, exact)


def tiles(lib, name: str, mutation: Mutation | None) -> str:
    return product(lib, name, mutation, 128, 13, lambda bench, w, x: bench.tiles(w, x, 8), exact_in_tiles, BY_DESIGN)


def rows(lib, name: str, mutation: Mutation | None) -> str:
    w = weights(lib, name, 5, columns_of(name))
    bench = Bench(name, "90", "others", mutate=mutation and mutation.apply)
    want = decoded(lib, name, w.blocks[0]).reshape(-1)

    def run():
        y = bench.device.room(want.nbytes)
        bench.device.call("ptx_dequantize", c_int(w.type_id), c_void_p(bench.weights(w).data), c_void_p(y), c_int(DST["f32"][0]), c_int64(want.size))
        return bench.device.memory.read(y, np.float32, want.shape)
    return judge(bench, run, lambda got: np.array_equal(got, want))


CASES = [(family, m) for family, mutations in ((vectors, VECTORS), (tiles, TILES), (rows, ROWS)) for m in mutations]


@pytest.mark.parametrize("family", [vectors, tiles, rows])
def test_without_a_mistake_nothing_is_noticed(lib, family):
    assert family(lib, "itq3_t", None) == "nothing"


@pytest.mark.parametrize("family,mutation", CASES, ids=[str(m) for _, m in CASES])
def test_a_mistake_is_noticed(lib, family, mutation):
    assert family(lib, "itq3_t", mutation) == mutation.noticed
