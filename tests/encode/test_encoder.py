"""Errors of the encoders on Gaussian, heavy-tailed and real weights; golden blocks."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ggml_ext import TYPES
from helpers.blocks import TYPE_NAMES
from helpers.native import BUILD, ROOT, require_built
from helpers.weights import assert_same_blocks, relative_mse

DATA = Path(__file__).parents[1] / "data"


def round_trip(lib, type_name: str, x: np.ndarray, **options) -> np.ndarray:
    type_id = int(TYPES[type_name].id)
    return lib.dequantize(type_id, lib.quantize(type_id, x, **options), x.shape[1])


@pytest.mark.parametrize("source", ["gaussian", "student_t4"])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_error_on_samples_is_as_recorded(lib, type_name, source):
    rng = np.random.default_rng(42)
    x = (rng.standard_normal((256, 4096)) if source == "gaussian" else rng.standard_t(4, (256, 4096))).astype(np.float32)
    error = relative_mse(round_trip(lib, type_name, x), x)
    print(f"{type_name} {source}: NMSE {error:.5f}")
    info = TYPES[type_name]
    if source == "gaussian":  # recorded to 3 or 4 digits; the standard error of 2^20 samples is about 1e-4 of the value
        assert abs(error - info.usual_rel_mse) <= min(2e-4, 0.01 * info.usual_rel_mse)
    else:
        assert error <= info.student_t4_rel_mse


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_error_on_real_weights_is_as_recorded(lib, type_name):
    """minilm_ffn_down.npy: 64 rows of each of the six feed-forward down projections of all-MiniLM-L6-v2 (Apache 2.0)."""
    x = np.load(DATA / "minilm_ffn_down.npy").astype(np.float32)
    error = relative_mse(round_trip(lib, type_name, x), x)
    print(f"{type_name} real weights: NMSE {error:.5f}")
    assert error <= TYPES[type_name].fixture_rel_mse


def test_papers_ternary_has_the_documented_error(lib):
    """With the ITQ3_S paper's three levels and scale, the NMSE is 0.26, more than seven times that of eight levels (0.034)."""
    x = np.random.default_rng(43).standard_normal((64, 4096)).astype(np.float32)
    assert 0.255 < relative_mse(round_trip(lib, "itq3_s", x, itq3_levels=3), x) < 0.27


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_result_does_not_depend_on_threads(lib, type_name):
    x = np.random.default_rng(44).standard_normal((64, 1024)).astype(np.float32)
    type_id = int(TYPES[type_name].id)
    expected = lib.quantize(type_id, x)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda rows: lib.quantize(type_id, np.ascontiguousarray(rows)), np.array_split(x, 9)))
    np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_extreme_blocks_stay_finite(lib, type_name):
    rng = np.random.default_rng(45)
    type_id, n = int(TYPES[type_name].id), TYPES[type_name].block_size
    x = np.stack([np.zeros(n), np.full(n, 3.5), np.full(n, -1e-3), np.eye(n)[17] * 1e4, np.r_[rng.standard_normal(n - 1), 3e38],
                  np.full(n, 3e38), rng.standard_normal(n) * 1e-44, rng.standard_normal(n) * 1e-9,
                  np.tile([1.0, -1.0], n // 2), np.r_[np.full(n // 2, 65504.0), np.full(n // 2, -65504.0)]]).astype(np.float32)
    blocks = lib.quantize(type_id, x)
    assert lib.validate(type_id, blocks)
    y = lib.dequantize(type_id, blocks, n)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(y[0], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_non_finite_weights_make_an_invalid_row(lib, type_name, bad, capfd):
    """llama-quantize validates encoded rows and so refuses such weights."""
    type_id, n = int(TYPES[type_name].id), TYPES[type_name].block_size
    x = np.ones((3, n), np.float32)
    x[1, n - 5] = bad
    assert not lib.validate(type_id, lib.quantize(type_id, x))
    assert "block 1" in capfd.readouterr().err


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_golden_blocks_are_unchanged(lib, type_name):
    """tests/helpers/make_golden.py wrote them. The decoder must never change, the encoder only on purpose."""
    golden = np.load(DATA / f"golden_{type_name}.npz")
    type_id = int(TYPES[type_name].id)
    decoded = lib.dequantize(type_id, golden["blocks"], TYPES[type_name].block_size)
    np.testing.assert_array_equal(decoded, golden["decoded"])
    assert_same_blocks(lib.quantize(type_id, golden["weights"]), golden["encoded"], f"{type_name}, golden weights")


@pytest.mark.skipif(not shutil.which("gcc") or platform.machine() != "x86_64", reason="needs GCC on x86-64")
@pytest.mark.parametrize("c_library", ["glibc", "musl"])
def test_function_clones_need_glibc(c_library):
    """Function clones are selected by IFUNC, which musl lacks, so GCC fails there unless EXT_CLONES is empty.

    The test simulates musl by undefining __GLIBC__ after the header that defines it.
    """
    require_built(BUILD, "libggml-base.so")
    undefine = "#undef __GLIBC__\n" if c_library == "musl" else ""
    code = f'#include <features.h>\n{undefine}#include "encode/encode.h"\nEXT_CLONES void encode(void);\n'
    include = [f"-I{folder}" for folder in (ROOT / "ggml_ext", BUILD / "llama.cpp/ggml/include", BUILD / "llama.cpp/ggml/src")]
    done = subprocess.run(["gcc", "-E", "-P", *include, "-x", "c", "-"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    is_new = int(subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True).stdout.split(".")[0]) >= 12
    assert ("target_clones" in done.stdout) == (c_library == "glibc" and is_new)
