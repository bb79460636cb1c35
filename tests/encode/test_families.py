"""Structured blocks are not worst cases of the rotated types: the error of every family stays near that of a Gaussian.

Sixteen blocks of a family have on average at most 1.3 times the type's usual error (types.toml). Single blocks vary more, Gaussian ones
too: none may exceed the worst of 8192 Gaussian blocks by more than a tenth.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers.blocks import nightly_except
from helpers.type_kinds import TYPE_KINDS

ROTATED = nightly_except([name for name, info in WEIGHT_TYPES.items() if info.rotated], TYPE_KINDS)
FACTOR = 1.3
N_BLOCKS = 16


def noise(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n)


def sparse(n: int, seed: int, n_values: int) -> np.ndarray:
    out = np.zeros(n)
    out[np.random.default_rng(seed + 1).permutation(n)[:n_values]] = noise(n, seed)[:n_values]
    return out


def families(n: int) -> dict[str, st.SearchStrategy]:
    """Return strategies for blocks of n weights, float64."""
    seeds, j, positions = st.integers(0, 2**32 - 1), np.arange(n), st.integers(0, n - 1)
    frequencies, phases = st.floats(0.001, np.pi), st.floats(0, np.pi)
    return {
        "constant": st.builds(lambda: np.ones(n)),
        "impulse": st.builds(lambda i: np.eye(n)[i], positions),
        "impulse with noise": st.builds(lambda i, seed, size: np.eye(n)[i] + size * noise(n, seed), positions, seeds, st.floats(0, 1)),
        "ramp": st.builds(lambda start: j - start, st.floats(-1000, 1000)),
        "cosine": st.builds(lambda f, phase: np.cos(f * j + phase), frequencies, phases),
        "cosine on a mean": st.builds(lambda f, phase, m: m + np.cos(f * j + phase), frequencies, phases, st.floats(-4, 4)),
        "mean plus noise": st.builds(lambda mean, seed: mean + noise(n, seed), st.floats(-8, 8), seeds),
        "sparse": st.builds(lambda seed, k: sparse(n, seed, k), seeds, st.integers(1, n // 4)),
        "heavy tails": st.builds(lambda seed, dof: np.random.default_rng(seed).standard_t(dof, n), seeds, st.floats(1, 5)),
        "alternating": st.builds(lambda width, slope: np.where(j // width % 2, 1.0, -1.0) * (1 + slope * j),
                                 st.integers(1, n // 8), st.floats(0, 0.02)),
        "alternating signs of noise": st.builds(lambda seed: np.abs(noise(n, seed)) * np.where(j % 2, 1.0, -1.0), seeds),
        "exponential": st.builds(lambda rate: np.exp(-rate * j), st.floats(0.0001, 1)),
    }


FAMILIES = {n: families(n) for n in (256, 64, 32)}
SCALES = st.floats(-4, 2).map(lambda e: 10.0**e)  # realistic magnitudes; the last test covers smaller ones


@functools.cache
def worst_gaussian_error(lib, name: str) -> float:
    return float(nmse_per_block(lib, name, np.random.default_rng(8192).standard_normal((8192, TYPES[name].block_size)).astype(np.float32)).max())


def nmse_per_block(lib, name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the NMSE of each block of float32 (n_blocks, block_size)."""
    type_id = int(TYPES[name].id)
    stored = lib.dequantize(type_id, lib.quantize(type_id, blocks), blocks.shape[1]).astype(np.float64)
    return ((stored - blocks) ** 2).sum(1) / (blocks.astype(np.float64) ** 2).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[256])
@pytest.mark.parametrize("name", ROTATED)
def test_structured_blocks_have_the_usual_error(lib, name, family):
    usual, worst = TYPES[name].usual_rel_mse, [0.0, 0.0]

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.lists(FAMILIES[TYPES[name].block_size][family], min_size=N_BLOCKS, max_size=N_BLOCKS), SCALES)
    def check(blocks, scale):
        x = np.array([block * (scale / np.sqrt(np.mean(block**2))) for block in blocks]).astype(np.float32)
        block_errors = nmse_per_block(lib, name, x)
        worst[:] = max(worst[0], block_errors.mean()), max(worst[1], block_errors.max())
        assert block_errors.mean() <= FACTOR * usual and block_errors.max() <= 1.1 * worst_gaussian_error(lib, name), f"{name}, {family}: {block_errors.round(4)}"

    check()
    print(f"{name}, {family}: rows {worst[0]:.4f}, blocks {worst[1]:.4f}, usual {usual}")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("position", [0, 1, 100, 255])
def test_impulse_of_itq3_s_is_stored_exactly(lib, position, sign):
    """Rotated, it has a single magnitude, so only the rounding of the scale to half remains."""
    x = (sign * 3 * np.eye(256)[[position]]).astype(np.float32)
    assert nmse_per_block(lib, "itq3_s", x)[0] <= (2.0**-11) ** 2


@pytest.mark.parametrize("name", sorted(WEIGHT_TYPES))
def test_subnormal_scales_keep_accuracy(lib, name):
    """Where the scale's steps are a quarter of it the error may grow by half; weights of 5e-9 become zeros, not noise."""
    x = np.random.default_rng(3).standard_normal((4096 // TYPES[name].block_size, TYPES[name].block_size)).astype(np.float32)
    tiny = x * np.float32(1e-5)
    assert nmse_per_block(lib, name, tiny).mean() <= 1.5 * nmse_per_block(lib, name, x).mean()
    assert (nmse_per_block(lib, name, x * np.float32(5e-9)) <= 1).all()
