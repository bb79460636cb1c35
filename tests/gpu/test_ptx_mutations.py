"""Mutation tests: the checks of test_ptx_products.py and test_ptx_others.py detect errors in the compiled kernels.

Each mutation edits one kernel's PTX, and the table says how it is detected: `fault`, at which a GPU would stop too; `problem`, which may
give the right result by luck; `result`, outside the error bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from helpers.blocks import dequantize_blocks
from helpers.cuda_host import DST
from helpers.ptx_products import (
    ALLOWED_PROBLEMS,
    ProductRunner,
    expected_product,
    expected_tiled_product,
    random_inputs,
    random_weights,
    row_length,
)
from ptx.memory import Fault


@dataclass(frozen=True)
class Mutation:
    """An edit that replaces the nth match of `pattern` in kernels whose mangled name contains `kernel`."""
    kernel: str
    edit_name: str
    pattern: str
    replacement: str | Callable
    detection: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.kernel}-{self.edit_name}".replace(" ", "-")

    def apply(self, text: str) -> str:
        parts = re.split(r"(?m)^(?=\.(?:visible |weak )?\.?entry|\.entry)", text)
        return "".join(self.edit_kernel(part) if self.kernel in part.split("(")[0] else part for part in parts)

    def edit_kernel(self, kernel: str) -> str:
        places = list(re.finditer(self.pattern, kernel))
        if len(places) <= self.nth:  # a variant that is not launched; if it were, the test would fail
            return kernel
        match = places[self.nth]
        return kernel[:match.start()] + (self.replacement(match) if callable(self.replacement) else match.expand(self.replacement)) + kernel[match.end():]


# a load's register and address; a shuffle up to its lane distance
LOAD, SHUFFLE = r"({}\s+%\w+), \[(%rd\d+)\]", r"(shfl\.sync\.bfly\.b32\s+%r\d+\|%p\d+, %r\d+), %?\w+"
TWO_BYTES_OFF = r"\1, [\2+2]"
WEIGHTS = LOAD.replace(r"\s+", " ").format(r"ld\.global\.nc\.u32")  # __ldg(); nvcc's own loads have a tab
INPUTS = LOAD.format(r"ld\.global\.[uf]32")
BARRIER, WAIT = r"bar\.sync\s+0;", r"griddepcontrol\.wait;"

VECTORS = [
    Mutation("mul_mat_vec_q", "no barrier", BARRIER, "", "problem"),
    Mutation("mul_mat_vec_q", "weights two bytes off", WEIGHTS, TWO_BYTES_OFF, "fault"),
    Mutation("mul_mat_vec_q", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("mul_mat_vec_q", "another thread's scale", r"\+256\]", "+260]", "result"),
    Mutation("mul_mat_vec_q", "no wait", WAIT, "", "problem"),
    Mutation("mul_mat_vec_q", "upstream's number of warps", r"(mov\.u32\s+%r\d+), %ntid\.y", r"\1, 4", "problem"),
    Mutation("quantize_q8", "inputs two bytes off", INPUTS, TWO_BYTES_OFF, "fault"),
    Mutation("quantize_q8", "a wrong lane", SHUFFLE, r"\1, 4", "result"),
    Mutation("quantize_q8", "another thread's scale", r"(st\.global\.u32\s+\[%rd\d+)\+256\]", r"\1+260]", "problem"),  # a write conflict
    Mutation("quantize_q8", "no wait", WAIT, "", "problem"),
]
TILES = [
    # barriers 0 to 2 belong to experts and columns, which later barriers order too
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


def detect(runner: ProductRunner, run, is_right, allowed=frozenset()) -> str:
    """Return how an error is detected: run() computes a result and is_right(result) checks it."""
    try:
        result = run()
    except Fault:
        return "fault"
    if set(runner.device.problems()) - allowed:
        return "problem"
    return "nothing" if is_right(result) else "result"


def detect_in_product(lib, name: str, mutation: Mutation | None, n_rows: int, n: int, k: int, run, bound, allowed=frozenset()) -> str:
    """Judge a product: run(runner, weights, inputs) computes it, bound returns the expected result and the error bound."""
    w, x = random_weights(lib, name, n_rows, row_length(name, k)), random_inputs(n, row_length(name, k))
    runner = ProductRunner(name, "90", mutate=mutation and mutation.apply)

    def is_right(actual):
        y = runner.activations(w, n)
        try:
            y.check(lib, name, x)
        except AssertionError:
            return False
        expected, tolerance = bound(w, 0, y)
        return bool((np.abs(actual - expected) <= tolerance).all())
    return detect(runner, lambda: run(runner, w, x), is_right, allowed)


def detect_in_vectors(lib, name: str, mutation: Mutation | None) -> str:
    return detect_in_product(lib, name, mutation, 12, 1, 2048, ProductRunner.multiply_vectors, expected_product)


def detect_in_tiles(lib, name: str, mutation: Mutation | None) -> str:
    return detect_in_product(lib, name, mutation, 128, 13, 512, lambda runner, w, x: runner.multiply_tiles(w, x, 8), expected_tiled_product, ALLOWED_PROBLEMS)


def detect_in_rows(lib, name: str, mutation: Mutation | None) -> str:
    w = random_weights(lib, name, 5, row_length(name))
    runner = ProductRunner(name, "90", "others", mutate=mutation and mutation.apply)
    expected = dequantize_blocks(lib, name, w.blocks[0]).reshape(-1)

    def run():
        y = runner.device.allocate(expected.nbytes)
        runner.device.call("ptx_dequantize", c_int(w.type_id), c_void_p(runner.weights(w).data), c_void_p(y), c_int(DST["f32"][0]), c_int64(expected.size))
        return runner.device.memory.read(y, np.float32, expected.shape)
    return detect(runner, run, lambda actual: np.array_equal(actual, expected))


CASES = [(detect_family, m) for detect_family, mutations in ((detect_in_vectors, VECTORS), (detect_in_tiles, TILES), (detect_in_rows, ROWS)) for m in mutations]


@pytest.mark.parametrize("detect_family", [detect_in_vectors, detect_in_tiles, detect_in_rows])
def test_unmutated_kernels_pass(lib, detect_family):
    assert detect_family(lib, "itq3_t", None) == "nothing"


@pytest.mark.parametrize("detect_family,mutation", CASES, ids=[str(m) for _, m in CASES])
def test_mutation_is_detected(lib, detect_family, mutation):
    assert detect_family(lib, "itq3_t", mutation) == mutation.detection
