"""Blocks that reach the corners of a format."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers.type_kinds import TYPE_KINDS

TYPE_NAMES = sorted(WEIGHT_TYPES)


def by_day(values: Iterable, some: Collection) -> list:
    """Values of a parameter, of which some run by day too and the others by night alone."""
    return [value if value in some else pytest.param(value, marks=pytest.mark.nightly) for value in values]


EACH_KIND = by_day(TYPE_NAMES, TYPE_KINDS)  # a type of each kind by day


def every_code_everywhere(type_name: str) -> np.ndarray:
    """Blocks in which every bit of the codes is set alone, cleared alone, and random bytes; finite scales."""
    info = TYPES[type_name]
    n_bits = 8 * info.block_bytes
    one_bit = np.packbits(np.eye(n_bits, dtype=np.uint8), axis=1, bitorder="little")
    random = np.random.default_rng(7).integers(0, 256, (2000, info.block_bytes), np.uint8)
    return np.concatenate([one_bit, ~one_bit, random])


# 0, subnormal, least normal, ordinary, negative, largest
CORNER_SCALES = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -0.37, 65504.0, -65504.0]


def corner_blocks(lib, type_name: str) -> np.ndarray:
    """uint8 (n, block_bytes): random codes; all pairs of corners in the first two halves, where halves are, and every value
    of the first two bytes' high and low byte for types with smaller scales. Blocks that are not valid are left out."""
    pairs = np.array([(a, b) for a in CORNER_SCALES for b in CORNER_SCALES], np.float16).view(np.uint8)
    rng = np.random.default_rng(8)
    every_byte = np.stack([np.arange(256), rng.permutation(256), *rng.integers(0, 256, (2, 256))], axis=1)
    blocks = rng.integers(0, 256, (len(pairs) + 256, TYPES[type_name].block_bytes), np.uint8)
    blocks[:, :4] = np.concatenate([pairs, every_byte])
    valid = np.array([lib.validate(TYPES[type_name].id, b[None]) for b in blocks])
    assert valid.sum() > 200
    return blocks[valid]
