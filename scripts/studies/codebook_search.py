#!/usr/bin/env python3
"""Search DITTO5's codebook: 32 symmetric values of seven bits for Gaussian blocks of 256, each block with its own scale.

    codebook_search.py [--blocks 1200] [--seed 11] [--show]

Round the values of Lloyd's algorithm to k + 0.5 with the largest between 56 and 63.5. Then move single values by 1 while that lowers the
NMSE. Print that error, the error on other blocks, and the codes of the upper half for ggml_ext/types.toml. --show prints
them for the codebook of types.toml. Other seeds end within 1 %.
"""
from __future__ import annotations

import argparse
import sys

import numpy as np

from ggml_ext import TYPES
from ggml_ext._console.cli import run_script

INFO = TYPES["ditto5"]
BLOCK, N_VALUES = 256, 2 * len(INFO.codebook)
OFFSET, TOP = INFO.codebook_offset, INFO.unpack_max - INFO.codebook_offset  # both 63.5
N_SCALES, N_REFITS, N_TURNS = 6, 4, 3


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the index of the level nearest to each x."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, x, side="right")


def fit_scales(blocks: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Fit an FP16 scale to each block (n, 256) from several starting points."""
    best_gain, best = np.zeros(len(blocks), np.float32), np.zeros(len(blocks), np.float32)

    def refit(scales: np.ndarray) -> bool:
        nonlocal best_gain, best
        q = levels[nearest(levels, blocks / np.where(scales > 0, scales, 1)[:, None])]
        xq, qq = (blocks * q).sum(1), (q * q).sum(1)
        new = (xq / qq).astype(np.float16).astype(np.float32)
        gain = new * (2 * xq - new * qq)
        better = gain > best_gain
        best_gain, best = np.where(better, gain, best_gain), np.where(better, new, best)
        return bool(better.any())

    low = 0.92 * np.sqrt((blocks**2).mean(1) / (levels**2).mean())
    high = np.maximum(1.5 * low, np.abs(blocks).max(1) / levels[-1])
    for share in np.arange(N_SCALES, dtype=np.float32) / (N_SCALES - 1):
        refit(low * (high / low) ** share)
    refit(np.full_like(low, np.sqrt((blocks**2).mean())))
    for _ in range(N_REFITS):
        if not refit(best):
            break
    return best


def error(blocks: np.ndarray, upper: np.ndarray) -> float:
    """Return the NMSE of blocks (n, 256) with the values `upper` and their negatives."""
    levels = np.concatenate([-upper[::-1], upper]).astype(np.float32)
    scales = fit_scales(blocks, levels)[:, None]
    stored = scales * levels[nearest(levels, blocks / scales)]
    return float(np.square(stored - blocks, dtype=np.float64).sum() / np.square(blocks, dtype=np.float64).sum())


def lloyd(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the centroids of N_VALUES weighted clusters of values. For a Gaussian, the local optimum is unique."""
    levels = np.quantile(values, (np.arange(N_VALUES) + 0.5) / N_VALUES)
    for _ in range(2000):
        index = nearest(levels, values)
        new = np.bincount(index, weights * values, N_VALUES) / np.bincount(index, weights, N_VALUES)
        if np.abs(new - levels).max() < 1e-6:
            break
        levels = new
    return levels


def free_levels(blocks: np.ndarray) -> np.ndarray:
    """Fit unrounded levels and block scales alternately; return the levels."""
    blocks = blocks[:: max(1, len(blocks) // 64)]
    scales = np.sqrt((blocks**2).mean(1))
    for _ in range(N_TURNS):
        levels = lloyd((blocks / scales[:, None]).ravel().astype(np.float64), np.repeat(scales.astype(np.float64) ** 2, BLOCK))
        scales = fit_scales(blocks, levels.astype(np.float32))
    return levels


def round_levels(upper: np.ndarray) -> np.ndarray:
    """Round levels to distinct k + 0.5 up to TOP."""
    out = np.clip(np.floor(upper) + 0.5, 0.5, TOP)
    for k in range(len(out) - 2, -1, -1):
        out[k] = min(out[k], out[k + 1] - 1)
    return out


def search(blocks: np.ndarray) -> np.ndarray:
    """Search the upper half of the codebook."""
    free = free_levels(blocks)
    half = (free[N_VALUES // 2 :] - free[: N_VALUES // 2][::-1]) / 2
    upper = min((round_levels(half / half[-1] * top) for top in np.arange(56, TOP + 0.5, 0.5)), key=lambda u: error(blocks, u))
    best, improved = error(blocks, upper), True
    while improved:
        improved = False
        for k in range(len(upper)):
            for change in (-1, 1):
                candidate = upper.copy()
                candidate[k] += change
                if 0 < candidate[0] and candidate[-1] <= TOP and (np.diff(candidate) > 0).all() and (e := error(blocks, candidate)) < best:
                    best, upper, improved = e, candidate, True
    return upper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1200, help="Gaussian blocks to fit (default: 1200)")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--show", action="store_true", help="print the codebook of types.toml")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    blocks, others = (rng.standard_normal((args.blocks, BLOCK)).astype(np.float32) for _ in range(2))
    upper = np.array(INFO.codebook) - OFFSET if args.show else search(blocks)
    print(f"NMSE {error(blocks, upper):.6f}, on other blocks {error(others, upper):.6f}")
    print(f"codebook    = {(upper + OFFSET).astype(int).tolist()}")


if __name__ == "__main__":
    sys.exit(run_script(main))
