"""GET_ROWS on the CPU: the decoders of rows, for every weight type and instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from ggml_ext import TYPES
from helpers import native
from helpers.blocks import TYPE_NAMES, corner_blocks, row_lengths
from helpers.native import I32, ISAS, kernels


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_rows_dequantize_as_in_the_reference(lib, type_name, isa):
    """For GET_ROWS: rows that end inside 256 weights, and extreme scales."""
    rows = [native.random_blocks(lib, type_name, (1, n), n)[0] for n in row_lengths(type_name, [1, 3])]
    for row in (*rows, *corner_blocks(lib, type_name)[:, None]):
        n = len(row) * TYPES[type_name].block_size
        expected = lib.dequantize(int(TYPES[type_name].id), row.reshape(1, -1), n)[0]
        np.testing.assert_array_equal(kernels(isa).dequantize_row(type_name, row), expected, err_msg=row.tobytes().hex())


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_get_rows_equals_dequantize(lib, type_name):
    """Embedding look-up applies the inverse rotation and gives the bits of the row decoder."""
    n = row_lengths(type_name, [3])[-1]
    rows = native.random_blocks(lib, type_name, (9, n), 3)
    ids = np.array([8, 0, 3, 3], np.int32)
    with native.Graph() as g:
        actual = g.compute("get_rows", g.tensor(TYPES[type_name].id, rows, (9, n)), g.tensor(I32, ids, ids.shape),
                           shape=(4, n))
    expected = lib.dequantize(int(TYPES[type_name].id), np.ascontiguousarray(rows.reshape(9, -1)), n)
    np.testing.assert_array_equal(actual, expected[ids])
