"""The numpy encoders of all types: equal to those in C byte for byte, with importances too, which lower the weighted error."""

import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext.quants import reference
from helpers.corpora import SEED, corpora
from helpers.weights import assert_same_blocks, weighted_blocks, weighted_error_ratio

CORPORA = {n: corpora(n) for n in (256, 64, 32)}
EACH = pytest.mark.parametrize("name", WEIGHT_TYPES)
# 5 % above the measured ratios
RATIOS = {"itq3_s": 0.21, "ccq2": 0.30, "ditto3": 0.73, "ditto5": 0.20,
          "itq4_t": 0.38, "itq3_t": 0.39, "itq2_t": 0.43, "itq1h_t": 0.46, "itq1_t": 0.54,
          "itq4_t64": 0.60, "itq3_t64": 0.60, "itq2_t64": 0.62, "itq1h_t64": 0.64, "itq1_t64": 0.70,
          "itq4_t32": 0.745, "itq3_t32": 0.745, "itq2_t32": 0.765}


KINDS = [(name, kind) for name, info in WEIGHT_TYPES.items() for kind in ("spread", "zeros", "all zero", "huge", "ties")
         if kind != "ties" or not info.trellis_bits]


@EACH
@pytest.mark.parametrize("corpus", CORPORA[64])
def test_equals_c(lib, name, corpus):
    n = TYPES[name].block_size
    x = CORPORA[n][corpus]
    if TYPES[name].trellis_bits:  # numpy takes long
        x = x[: 24 * 256 // n]
    with np.errstate(over="ignore", invalid="ignore"):
        actual = reference(name).quantize_blocks(x)
    assert_same_blocks(actual, lib.quantize(int(TYPES[name].id), x), f"{name}, {corpus}, seed {SEED}")


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_equals_c_with_importances(lib, name, kind):
    """One row of many blocks, since an imatrix has a value per column."""
    n = 64 if name in ("ccq2", "ditto3") else 24
    x, importance = weighted_blocks(kind, n, decades=3, block_size=TYPES[name].block_size)
    x[3] = 0
    expected = lib.quantize(int(TYPES[name].id), x.reshape(1, -1), imatrix=importance.ravel()).reshape(n, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_blocks(reference(name).quantize_blocks(x, importance), expected, f"{name} with importance, {kind}, seed {SEED}")


@pytest.mark.parametrize(("name", "limit"), RATIOS.items())
def test_importance_lowers_the_weighted_error(lib, name, limit):
    assert weighted_error_ratio(lib, name) < limit
