#!/usr/bin/env python3
"""Search the constants of CCQ2 (ggml_ext/types/ccq2.h): alpha, beta and the split of the scale bits.

    ccq2_study.py [--blocks 200]

Print the NMSE of random weights and of tests/data/minilm_ffn_down.npy. Alpha and beta are compared on vectors of four weights with one scale,
splits on full blocks with the best of all scales that the split can represent.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from ggml_ext._console.cli import run_script

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "minilm_ffn_down.npy"
# name -> multipliers of the group scales, super scales per octave
SPLITS = {
    "half, no group scales": ([1], 32),
    "E5M3 + 4x2 bits, {5, 6, 7, 8}": ([5 / 8, 6 / 8, 7 / 8, 1], 8),
    "E5M3 + 4x2 bits, {5, 6, 8, 11}": ([5 / 11, 6 / 11, 8 / 11, 1], 8),
    "E5M3 + 4x2 bits, {2, 3, 4, 6}": ([2 / 6, 3 / 6, 4 / 6, 1], 8),
    "E4 + 4x3 bits, {4, ... 11}": ([i / 11 for i in range(4, 12)], 1),
}


def codebook(alpha: float, beta: float) -> np.ndarray:
    """Return the four values of each byte, float32 (256, 4)."""
    c = np.clip(np.floor(alpha * np.arange(256) + beta + 0.5), 0, 2**15 - 1).astype(int)
    return (((c[:, None] >> np.array([9, 6, 3, 0])) & 63) - 32).astype(np.float32)


def squared_error(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the smallest squared errors (n,) of vectors x (n, 4) with the scales (4,)."""
    v = values * scale
    return ((v * v).sum(1) - 2 * x @ v.T).min(1) + (x * x).sum(1)


def codebook_error(x: np.ndarray, alpha: float, beta: float) -> float:
    """Return the NMSE of vectors x (n, 4) with the best common scale."""
    values = codebook(alpha, beta)
    return min(float(squared_error(x, values, np.full(4, s, np.float32)).sum()) for s in np.arange(0.05, 0.0751, 0.0025)) / float((x * x).sum())


def split_error(blocks: np.ndarray, multipliers: list[float], steps: int, values: np.ndarray) -> float:
    """Return the NMSE of blocks (n, 256), each with its best scales."""
    total = 0.0
    for block in blocks:
        pairs = block.reshape(2, 4, 32).transpose(0, 2, 1)  # vectors of the two halves, over groups 0, 1 and 2, 3
        top = 0.0625 * np.sqrt((block.reshape(4, 64) ** 2).mean(1).max())
        first = np.floor(np.log2(top) * steps) - (steps // 2 + 1)
        best = np.inf
        for step in range(2 * steps + 3):
            exponent = (first + step) / steps
            octave, fraction = divmod(exponent, 1)
            super_scale = 2.0**octave * (1 + fraction)  # mantissas are linear
            scales = super_scale * np.array(multipliers, np.float32)
            best = min(best, sum(min(squared_error(pair, values, np.array([a, a, b, b])).sum() for a in scales for b in scales)
                                 for pair in pairs))
        total += best
    return total / float((blocks.astype(np.float64) ** 2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="blocks per sample (default: 200)")
    args = parser.parse_args()
    rng = np.random.default_rng(1)

    vectors = rng.standard_normal((16384, 4)).astype(np.float32)
    print("alpha, beta: NMSE of Gaussian vectors with one scale")
    for alpha in (118, 119, 120, 120.5, 121, 121.5, 122, 124):
        error, beta = min((codebook_error(vectors, alpha, beta), beta) for beta in range(800, 1601, 100) if 255 * alpha + beta < 2**15)
        print(f"  {alpha:6}, {beta:5}: {error:.4f}")
    print(f"     121,  1178: {codebook_error(vectors, 121, 1178):.4f}\n   128.5,     0: {codebook_error(vectors, 128.498, 0):.4f}")

    real = np.load(DATA).astype(np.float32).reshape(-1, 256)
    samples = {"Gaussian": rng.standard_normal((args.blocks, 256)).astype(np.float32),
               "Student t, 4 d.o.f.": rng.standard_t(4, (args.blocks, 256)).astype(np.float32),
               "real weights": real[rng.choice(len(real), args.blocks, replace=False)]}
    values = codebook(121, 1178)
    print(f"\n| split of the 16 bits | {' | '.join(samples)} |\n|" + " --- |" * (1 + len(samples)))
    for name, (multipliers, steps) in SPLITS.items():
        cells = [f"{split_error(x, multipliers, steps, values):.4f}" for x in samples.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
