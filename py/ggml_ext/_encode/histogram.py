"""Histograms of the codes and scales of ggml-ext types, from samples of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from .. import quants
from .._base.types import WEIGHT_TYPES
from .._formats.gguf_file import GGUFFile, Tensor

SAMPLE_WEIGHTS = 1 << 18  # per tensor: enough for shares exact to 0.1 %
PIECE_WEIGHTS = 1 << 16  # decoded at once; the pieces of a sample have a quarter
N_PIECES = 16
CODES = np.arange(-128, 128)
MIN_OCTAVE, MAX_OCTAVE = -149, 128  # of float32; octave k: from 2^k up to 2^(k + 1)
MAX_BARS, BAR_WIDTH = 16, 40


def sample_blocks(file: GGUFFile, tensor: Tensor) -> Iterator[np.ndarray]:
    """Yield blocks, uint8 (n_blocks, block_bytes): all of a small tensor, evenly spaced pieces of a larger one."""
    info = WEIGHT_TYPES[tensor.type.name.lower()]
    n_blocks = tensor.n_bytes // info.block_bytes
    if tensor.n_elements <= SAMPLE_WEIGHTS:
        step = PIECE_WEIGHTS // info.block_size
        starts = range(0, n_blocks, step)
    else:
        step = SAMPLE_WEIGHTS // N_PIECES // info.block_size
        starts = np.linspace(0, n_blocks - step, N_PIECES).astype(int).tolist()
    for start in starts:
        yield file.pieces(tensor, info.block_bytes, start, min(step, n_blocks - start))


def decode_fields(type_name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack blocks, uint8 (n_blocks, block_bytes), to codes and scales: (rotated) weight = scale * (code - offset).

    Returns:
        Codes, integers of any shape, and scales, float32 (n,). Some types multiply the scale of a block by integer scales of its groups.
    """
    codes, *others = quants.reference(type_name).unpack(blocks)
    scales = next(o for o in others if o.dtype == np.float32)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        for group_scales in (o for o in others if o.ndim == 2):
            scales = scales * group_scales.astype(np.float32)
    return codes, scales.ravel()


@dataclass
class Histogram:
    """The codes and scales of all tensors of a type."""

    n_weights: int = 0  # of all tensors
    n_sampled: int = 0  # of these
    codes: np.ndarray = field(default_factory=lambda: np.zeros(len(CODES), np.int64))  # counts of CODES
    octaves: np.ndarray = field(default_factory=lambda: np.zeros(MAX_OCTAVE - MIN_OCTAVE, np.int64))  # counts of scales by magnitude
    n_zero: int = 0  # scales, as the next two
    n_negative: int = 0
    n_not_finite: int = 0

    def add(self, file: GGUFFile, tensor: Tensor) -> None:
        """Sample a tensor."""
        self.n_weights += tensor.n_elements
        for blocks in sample_blocks(file, tensor):
            codes, scales = decode_fields(tensor.type.name.lower(), blocks)
            self.n_sampled += codes.size
            self.codes += np.bincount(codes.ravel().astype(np.int64) - CODES[0], minlength=len(CODES))
            is_finite = np.isfinite(scales)
            magnitudes = np.abs(scales[is_finite & (scales != 0)])
            self.octaves += np.bincount(np.frexp(magnitudes)[1] - 1 - MIN_OCTAVE, minlength=len(self.octaves))
            self.n_zero += int((scales == 0).sum())
            self.n_negative += int((is_finite & (scales < 0)).sum())
            self.n_not_finite += int((~is_finite).sum())

    @property
    def entropy(self) -> float:
        """Entropy of the codes, in bits per code."""
        share = self.codes[self.codes > 0] / max(self.codes.sum(), 1)
        return float(-(share * np.log2(share)).sum()) + 0.0

    @property
    def n_scales(self) -> int:
        return int(self.octaves.sum()) + self.n_zero + self.n_not_finite

    def record(self) -> dict:
        """Make the record for --json."""
        return {
            "weights": self.n_weights,
            "weights_read": self.n_sampled,
            "code_entropy": round(self.entropy, 6),
            "codes": {str(c): int(n) for c, n in zip(CODES, self.codes) if n},
            "scale_octaves": {str(MIN_OCTAVE + i): int(n) for i, n in enumerate(self.octaves) if n},
            "scales": {"number": self.n_scales, "zero": self.n_zero, "negative": self.n_negative, "not_finite": self.n_not_finite},
        }

    def lines(self, type_name: str) -> list[str]:
        """Draw the codes, grouped if there are many, and the octaves of the scales as bars of text."""
        part = "all" if self.n_sampled == self.n_weights else f"{min(100 * self.n_sampled / self.n_weights, 99):.2g} % of the"
        out = ["", f"{type_name}: codes of {part} {self.n_weights:,} weights, entropy {self.entropy:.2f} bits"]
        out += _bars(self.codes, lambda first, last: f"{CODES[first]}" if first == last else f"{CODES[first]} to {CODES[last]}")
        special = {"zero": self.n_zero, "negative": self.n_negative, "not finite": self.n_not_finite}
        details = "".join(f", {n:,} {name}" for name, n in special.items() if n)
        out += ["", f"{type_name}: magnitudes of {self.n_scales:,} scales{details}"]
        return out + _bars(self.octaves, lambda first, last: f"2^{MIN_OCTAVE + first} to 2^{MIN_OCTAVE + last + 1}")


def _bars(counts: np.ndarray, label: Callable[[int, int], str]) -> list[str]:
    """Draw a bar for each group of counts from the first to the last that is not 0. label(first, last): of a group."""
    used = np.flatnonzero(counts)
    if not used.size:
        return []
    first, last = int(used[0]), int(used[-1])
    step = -(-(last - first + 1) // MAX_BARS)
    groups = [(i, min(i + step - 1, last)) for i in range(first, last + 1, step)]
    sums = [int(counts[a : b + 1].sum()) for a, b in groups]
    names = [label(a, b) for a, b in groups]
    width = max(map(len, names))
    return [
        f"  {name:>{width}}  {100 * n / counts.sum():5.1f} %  {'#' * round(BAR_WIDTH * n / max(sums))}".rstrip()
        for name, n in zip(names, sums)
    ]
