"""Block layouts of the upstream scalar types, as in ggml_ext/encode/upstream-layouts.h: where a block keeps its codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

T = GGMLQuantizationType
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # kvalues_iq4nl
FP4_LEVELS = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float32)  # twice the E2M1 values
SIGN_LEVELS = np.array([-1, 1], np.float32)
FP4_INDICES = np.array([*range(7, 15), 7, *range(6, -1, -1)])  # in FP4_LEVELS, of the codes
FP4_CODES = np.array([*range(15, 8, -1), *range(8)])  # of FP4_LEVELS


@dataclass(frozen=True)
class Bits:
    """The positions of some bits of small integers in a block.

    Attributes:
        byte: byte of each integer's bits, int (n_integers,).
        shift: lowest bit in that byte.
        n: number of bits.
        lowest: lowest bit in the integer.
        columns: the integers that have these bits.
    """

    byte: np.ndarray
    shift: np.ndarray
    n: int
    lowest: int = 0
    columns: np.ndarray | slice = field(default_factory=lambda: slice(None))

    def read(self, blocks: np.ndarray, integers: np.ndarray) -> None:
        integers[:, self.columns] |= (blocks[:, self.byte] >> self.shift & (1 << self.n) - 1) << self.lowest

    def write(self, integers: np.ndarray, blocks: np.ndarray) -> None:
        """Write the bits of integers into blocks that are zero there."""
        values = (integers[:, self.columns] >> self.lowest & (1 << self.n) - 1) << self.shift
        index: Any = (slice(None), self.byte)  # numpy's stub lacks slices
        np.bitwise_or.at(blocks, index, values.astype(np.uint8))


@dataclass(frozen=True)
class Steps:
    """Where a block keeps steps of eight bits, and the values of all bytes; half the scales, as FP4_LEVELS are twice the values.

    Attributes:
        bytes: of the sub-blocks.
        values: by byte, float32 (256,).
        largest: the byte of the largest value.
    """

    bytes: slice
    values: np.ndarray
    largest: int

    def round(self, v: np.ndarray) -> np.ndarray:
        """Return the nearest values, float32."""
        values = self.values[: self.largest + 1]
        above = np.searchsorted(values, np.clip(v, 0, values[-1])).clip(1)
        middle = (values[above - 1].astype(np.float64) + values[above]) / 2
        # of two equals the even multiple; powers of two: the larger
        is_upper = (v > middle) | ((v == middle) & ((above % 2 == 0) | (self.largest == 254)))
        return np.where(is_upper, values[above], values[above - 1])


def _e8m0_steps() -> np.ndarray:
    """Return the steps of MXFP4. Those below 2^-126 count as 0: their inverse is not a float."""
    exponents = np.arange(256) - 128
    return np.where(exponents < -126, 0, np.exp2(exponents.astype(np.float64))).astype(np.float32)


def _ue4m3_steps() -> np.ndarray:
    """Return the steps of NVFP4. The bit of the sign does not count, and 127 means 0."""
    exponent, mantissa = np.arange(256) >> 3 & 15, np.arange(256) & 7
    steps = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float32), -10), np.ldexp((8 + mantissa).astype(np.float32), exponent - 11))
    return np.where(np.arange(256) % 128 == 127, 0, steps).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """The block layout of a type.

    Attributes:
        sub: weights per sub-block.
        low, high: range of the codes.
        codes, scales, mins: bits of a block's integers.
        fp16_offsets: offsets of d and, if the type has mins, dmin in a block.
        scale_range: range of the integer scales; None if the scale and min of a sub-block are d and dmin themselves.
        min_high: largest integer min.
        levels: the levels of indices, from which the codes follow; None if levels are integers.
        steps: steps of eight bits, in types without FP16 scales.
        search: first steps to try are the largest weight times search[0] + k * search[1]; None: those of llama.cpp's encoder.
        search_negative: also try negative steps.
        scales_are_signed: the bits of scales are signed bytes; others are stored minus the lowest scale.
    """

    sub: int
    low: int
    high: int
    codes: list[Bits]
    fp16_offsets: list[int]
    scales: list[Bits] = field(default_factory=list)
    mins: list[Bits] = field(default_factory=list)
    scale_range: tuple[int, int] | None = None
    min_high: int = 0
    levels: np.ndarray | None = None
    scales_are_signed: bool = False
    steps: Steps | None = None
    search: tuple[float, float] | None = None
    search_negative: bool = False

    @property
    def has_min(self) -> bool:
        return len(self.fp16_offsets) == 2


def _pairs(start: int, lowest: int = 0) -> Bits:
    j = np.arange(256)
    return Bits(start + j // 128 * 32 + j % 32, j % 128 // 32 * 2, 2, lowest)


def _nibbles(start: int, n: int) -> Bits:
    j = np.arange(n)
    return Bits(start + j // 32 * 16 + j % 16, j % 32 // 16 * 4, 4)


def _in_order(start: int, n: int, bits: int) -> Bits:
    """Return the positions of n codes that follow one another."""
    j = np.arange(n) * bits
    return Bits(start + j // 8, j % 8, bits)


def _nibbles_64(start: int) -> Bits:
    j = np.arange(256)
    return Bits(start + j // 64 * 32 + j % 32, j % 64 // 32 * 4, 4)


def _planes(start: int, lowest: int) -> Bits:
    """Return the positions of one bit of each of 256 codes."""
    j = np.arange(256)
    return Bits(start + j % 32, j // 32, 1, lowest)


def _fifth_bits(start: int) -> Bits:
    j = np.arange(32)
    return Bits(start + j // 8, j % 8, 1, 4)


def _six_bits(offset: int) -> list[Bits]:
    """Return the positions of the eight scales (offset 0) or mins (offset 4) of Q4_K and Q5_K. offset: in bytes, and in bits of a shared byte."""
    s = np.arange(4)
    late = s + 4
    return [
        Bits(4 + s + offset, 0 * s, 6, 0, s), Bits(4 + late + 4, 0 * s + offset, 4, 0, late), Bits(4 + s + offset, 0 * s + 6, 2, 4, late)
    ]


_S8, _S16, _S64 = np.arange(8), np.arange(16), np.arange(64)
LAYOUTS: dict[GGMLQuantizationType, Layout] = {
    T.Q2_K: Layout(
        16, 0, 3, [_pairs(16)], [80, 82], scales=[Bits(_S16, 0 * _S16, 4)], mins=[Bits(_S16, 0 * _S16 + 4, 4)], scale_range=(0, 15), min_high=15
    ),
    T.Q3_K: Layout(
        16, -4, 3, [_pairs(32), _planes(0, 2)], [108],
        scales=[Bits(96 + _S16 % 8, _S16 // 8 * 4, 4), Bits(104 + _S16 % 4, _S16 // 4 * 2, 2, 4)], scale_range=(-32, 31),
    ),
    T.Q4_K: Layout(32, 0, 15, [_nibbles_64(16)], [0, 2], scales=_six_bits(0), mins=_six_bits(4), scale_range=(0, 63), min_high=63),
    T.Q5_K: Layout(
        32, 0, 31, [_nibbles_64(48), _planes(16, 4)], [0, 2], scales=_six_bits(0), mins=_six_bits(4), scale_range=(0, 63), min_high=63
    ),
    T.Q6_K: Layout(
        16, -32, 31,
        [Bits(np.arange(256) // 128 * 64 + np.arange(256) % 64, np.arange(256) % 128 // 64 * 4, 4), _pairs(128, 4)],
        [208], scales=[Bits(192 + _S16, 0 * _S16, 8)], scale_range=(-128, 127), scales_are_signed=True,
    ),
    T.IQ4_XS: Layout(
        32, 0, 15, [_nibbles(8, 256)], [0], scales=[Bits(4 + _S8 // 2, _S8 % 2 * 4, 4), Bits(2 + _S8 // 4, _S8 % 4 * 2, 2, 4)],
        scale_range=(-32, 31), levels=IQ4_LEVELS,
    ),
    T.Q4_0: Layout(32, -8, 7, [_nibbles(2, 32)], [0]),
    T.Q4_1: Layout(32, 0, 15, [_nibbles(4, 32)], [0, 2]),
    T.Q5_0: Layout(32, -16, 15, [_nibbles(6, 32), _fifth_bits(2)], [0]),
    T.Q5_1: Layout(32, 0, 31, [_nibbles(8, 32), _fifth_bits(4)], [0, 2]),
    T.IQ4_NL: Layout(32, 0, 15, [_nibbles(2, 32)], [0], levels=IQ4_LEVELS),
    GGMLQuantizationType["Q2_0"]: Layout(64, -1, 2, [_in_order(2, 64, 2)], [0], search=(0.0625, 0.03125), search_negative=True),
    T.Q1_0: Layout(128, 0, 1, [_in_order(2, 128, 1)], [0], levels=SIGN_LEVELS, search=(0.0625, 0.03125)),
    T.MXFP4: Layout(
        32, 0, 14, [_nibbles(1, 32)], [], levels=FP4_LEVELS, steps=Steps(slice(0, 1), _e8m0_steps(), 254), search=(0.0390625, 0.0078125)
    ),
    T.NVFP4: Layout(
        16, 0, 14, [Bits(4 + _S64 // 16 * 8 + _S64 % 8, _S64 % 16 // 8 * 4, 4)], [], levels=FP4_LEVELS,
        steps=Steps(slice(0, 4), _ue4m3_steps(), 126), search=(0.0625, 0.00390625),
    ),
}
