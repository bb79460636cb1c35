#!/usr/bin/env python3
"""The search behind the signs of the rotation R = H S (ggml_ext/types.toml): smooth rows are no worst cases under them.

    rotation_signs.py [--seconds 240] [--seed 1]     search
    rotation_signs.py --show                         what the signs of types.toml do

A fixed Walsh-Hadamard transform gathers constants, ramps and slow waves into few values, which no quantizer of a bell likes.
Random signs before it spread them; these were climbed to on the families below, for blocks of 256 and, with the first 64 signs,
for blocks of 64. What is minimised is the error of the worst member under a uniform quantizer of eight levels with its best
scale, relative squared; a Gaussian block has 0.037. The trellis types follow it (their errors: docs/results/encoders.md).
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from families import families
from ggml_ext._console.cli import run_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).resolve().parents[2] / "ggml_ext" / "types.toml"
BLOCK, SHORT = 256, 64


def hadamard(n: int) -> np.ndarray:
    """The normalised Walsh-Hadamard matrix in Sylvester order, float32 (n, n)."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.float32(np.sqrt(n))


def errors(y: np.ndarray) -> np.ndarray:
    """Relative squared errors of blocks of norm sqrt(n) under eight uniform levels with the best of several scales."""
    best = np.full(len(y), np.inf, np.float32)
    for d in (0.35, 0.42, 0.5, 0.56, 0.62, 0.7, 0.8, 0.95):
        q = np.clip(np.floor(y / np.float32(d)), -4, 3) + np.float32(0.5)
        best = np.minimum(best, ((q * np.float32(d) - y) ** 2).mean(axis=1))
    return best


def sizes(n_waves: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(blocks, transform) of both sizes."""
    return [(np.concatenate(list(families(n, n_waves).values())), hadamard(n)) for n in (BLOCK, SHORT)]


def score(signs: np.ndarray, of: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """What is minimised: the worst and, to tell equals apart, the mean error; shorter blocks vary more and count for less."""
    total = 0.0
    for (blocks, h), share in zip(of, (1.0, 0.5)):
        found = errors((blocks * signs[: len(h)]) @ h)
        total += share * (found.max() + 0.2 * np.sort(found)[-len(found) // 20 :].mean() + found.mean())
    return total


def search(seconds: float, seed: int) -> np.ndarray:
    """Signs float32 (256,): the best of random ones, then flips of one to three signs as long as they help."""
    rng = np.random.default_rng(seed)
    coarse, fine = sizes(24), sizes(96)
    start = time.monotonic()
    tried = []
    while time.monotonic() - start < seconds / 4:
        signs = rng.choice(np.float32([-1, 1]), BLOCK)
        tried.append((score(signs, coarse), tuple(signs)))
    print(f"{len(tried)} random patterns: {min(tried)[0]:.4f} to {max(tried)[0]:.4f}", flush=True)
    best = np.array(min(tried)[1], np.float32)
    least, n_steps = score(best, fine), 0
    while time.monotonic() - start < seconds:
        new = best.copy()
        new[rng.choice(BLOCK, rng.integers(1, 4), replace=False)] *= -1
        n_steps += 1
        if (found := score(new, fine)) < least:
            best, least = new, found
    print(f"{n_steps} changes tried: {least:.4f}", flush=True)
    return best


def to_hex(signs: np.ndarray) -> str:
    """Bit j % 8 of byte j / 8 is set where sign j is negative."""
    return np.packbits(signs < 0, bitorder="little").tobytes().hex()


def from_hex(text: str) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def show(signs: np.ndarray) -> None:
    print("| family | blocks of 256: worst, mean | no signs | blocks of 64: worst, mean | no signs |\n|" + " --- |" * 5)
    of = {n: families(n, 256, seed=1) for n in (BLOCK, SHORT)}
    for name in of[BLOCK]:
        cells = []
        for n in (BLOCK, SHORT):
            for pattern in (signs[:n], np.ones(n, np.float32)):
                found = errors((of[n][name] * pattern) @ hadamard(n))
                cells.append(f"{found.max():.4f}, {found.mean():.4f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    signs = from_hex(tomllib.loads(TABLE.read_text())["rotation"]["signs"]) if args.show else search(args.seconds, args.seed)
    print(to_hex(signs))
    show(signs)


if __name__ == "__main__":
    sys.exit(run_script(main))
