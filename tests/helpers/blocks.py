"""Blocks at the limits of a format."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers.type_kinds import TYPE_KINDS

TYPE_NAMES = sorted(WEIGHT_TYPES)


def nightly_except(values: Iterable, quick: Collection) -> list:
    """Return the values of a parameter; only `quick` ones run outside make nightly."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.nightly) for value in values]


EACH_KIND = nightly_except(TYPE_NAMES, TYPE_KINDS)


def bit_coverage_blocks(type_name: str) -> np.ndarray:
    """Return blocks with every single bit set, with every single bit cleared, and random ones."""
    info = TYPES[type_name]
    n_bits = 8 * info.block_bytes
    one_bit = np.packbits(np.eye(n_bits, dtype=np.uint8), axis=1, bitorder="little")
    random = np.random.default_rng(7).integers(0, 256, (2000, info.block_bytes), np.uint8)
    return np.concatenate([one_bit, ~one_bit, random])


# zero, subnormal, smallest normal, ordinary, negative, largest
CORNER_SCALES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -0.37, 65504.0, -65504.0]


def row_lengths(type_name: str, blocks: list[int]) -> list[int]:
    """Return row lengths of n*256; for shorter blocks also those that end inside 256 weights."""
    return [256 * n - less for n in blocks for less in range(0, 256, TYPES[type_name].block_size)]


def corner_blocks(lib, type_name: str) -> np.ndarray:
    """Return valid blocks with random codes and extreme scales, uint8 (n, block_bytes).

    The first two halves take all pairs of CORNER_SCALES; for types with 8-bit scales the first bytes take every value.
    """
    pairs = np.array([(a, b) for a in CORNER_SCALES for b in CORNER_SCALES], np.float16).view(np.uint8)
    rng = np.random.default_rng(8)
    every_byte = np.stack([np.arange(256), rng.permutation(256), *rng.integers(0, 256, (2, 256))], axis=1)
    blocks = rng.integers(0, 256, (len(pairs) + 256, TYPES[type_name].block_bytes), np.uint8)
    blocks[:, :4] = np.concatenate([pairs, every_byte])
    valid = np.array([lib.validate(TYPES[type_name].id, b[None]) for b in blocks])
    assert valid.sum() > 200
    return blocks[valid]


def type_id(name: str) -> int:
    return int(TYPES[name].id)


def rotate_for(lib, name: str, x: np.ndarray) -> np.ndarray:
    """Rotate float32 (..., n) if the type is rotated."""
    info, x = TYPES[name], np.ascontiguousarray(x, np.float32)
    return lib.rotate(x.reshape(-1, info.block_size)).reshape(x.shape) if info.rotated else x


def dequantize_blocks(lib, name: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantize uint8 (..., n_blocks, block_bytes) to float32 (..., n_blocks * block_size)."""
    info = TYPES[name]
    weights = lib.dequantize(int(info.id), np.ascontiguousarray(blocks).reshape(-1, info.block_bytes), info.block_size)
    return weights.reshape(*blocks.shape[:-2], -1)
