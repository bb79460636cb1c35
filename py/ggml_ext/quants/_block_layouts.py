"""Block layouts of the upstream scalar types, as in ggml_ext/encode/upstream-layouts.h: where a block keeps its codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

T = GGMLQuantizationType
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # kvalues_iq4nl


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
class Layout:
    """The block layout of a type.

    Attributes:
        sub: weights per sub-block.
        low, high: range of the codes.
        codes, scales, mins: bits of a block's integers.
        fp16_offsets: offsets of d and, if the type has mins, dmin in a block.
        scale_range: range of the integer scales; None if a block is one sub-block, whose scale and min are d and dmin themselves.
        min_high: largest integer min.
        has_table: codes are indices of TABLE.
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
    has_table: bool = False
    scales_are_signed: bool = False

    @property
    def has_min(self) -> bool:
        return len(self.fp16_offsets) == 2


def _pairs(start: int, lowest: int = 0) -> Bits:
    j = np.arange(256)
    return Bits(start + j // 128 * 32 + j % 32, j % 128 // 32 * 2, 2, lowest)


def _nibbles(start: int, n: int) -> Bits:
    j = np.arange(n)
    return Bits(start + j // 32 * 16 + j % 16, j % 32 // 16 * 4, 4)


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


_S8, _S16 = np.arange(8), np.arange(16)
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
        scale_range=(-32, 31), has_table=True,
    ),
    T.Q4_0: Layout(32, -8, 7, [_nibbles(2, 32)], [0]),
    T.Q4_1: Layout(32, 0, 15, [_nibbles(4, 32)], [0, 2]),
    T.Q5_0: Layout(32, -16, 15, [_nibbles(6, 32), _fifth_bits(2)], [0]),
    T.Q5_1: Layout(32, 0, 31, [_nibbles(8, 32), _fifth_bits(4)], [0, 2]),
    T.IQ4_NL: Layout(32, 0, 15, [_nibbles(2, 32)], [0], has_table=True),
}
