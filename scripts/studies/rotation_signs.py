#!/usr/bin/env python3
"""Search the signs of the rotation R = H S (ggml_ext/types.toml).

    rotation_signs.py [--seconds 240] [--seed 1]     search
    rotation_signs.py --show                         show the errors with the signs of types.toml

A Walsh-Hadamard transform alone gathers constants, ramps and slow waves into few large values. Signs before it spread them. The search
minimizes the NMSE of the worst block of the families below, under a uniform quantizer of eight levels with its best scale, for blocks of 256
and, with the first 64 signs, of 64. A Gaussian block has 0.037.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from ggml_ext._console.cli import run_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).resolve().parents[2] / "ggml_ext" / "types.toml"
BLOCK, SHORT = 256, 64


def hadamard(n: int) -> np.ndarray:
    """Return the normalized Walsh-Hadamard matrix in Sylvester order, float32 (n, n)."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.float32(np.sqrt(n))


def errors(y: np.ndarray) -> np.ndarray:
    """Return the NMSE of blocks of norm sqrt(n) under eight uniform levels with the best of several scales."""
    best = np.full(len(y), np.inf, np.float32)
    for d in (0.35, 0.42, 0.5, 0.56, 0.62, 0.7, 0.8, 0.95):
        q = np.clip(np.floor(y / np.float32(d)), -4, 3) + np.float32(0.5)
        best = np.minimum(best, ((q * np.float32(d) - y) ** 2).mean(axis=1))
    return best


def families(n: int, n_waves: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return blocks with structure by the name of their family, float32 (n_blocks, n), each of norm sqrt(n)."""
    j = np.arange(n)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((8, n))
    outlier = 10.0 ** np.arange(8)[:, None]
    steps = [np.where((j >= a) & (j < a + w), 1.0, 0.0) for w in (n // 16, n // 8, n // 4, n // 2) for a in range(0, n - w + 1, n // 16)]
    blocks = {
        "constant": np.ones((1, n)),
        "mean plus noise": np.concatenate([mean + noise for mean in (0.5, 1, 3)]),
        "cosine": np.array([np.cos(f * j + p) for f in np.pi * (np.arange(n_waves) + 0.5) / n_waves for p in (0, 0.8, 1.6, 2.4)]),
        "slow cosine": np.array([np.cos(f * j + p) for f in 0.1 * np.arange(1, 17) / 16 for p in (0, 0.8, 1.6, 2.4)]),
        "wave on a mean": np.array([0.05 * m + np.cos(f * j) for f in (0.1, 0.5, 1, 2, 3) for m in (1, 10, 20)]),
        "ramp": np.array([j - c * n for c in (0, 0.25, 0.5, 0.75, 1, -1)]),
        "power": np.array([(j / n) ** p for p in (0.5, 2, 3)] + [np.exp(-j / (n * t)) for t in (0.1, 0.3, 1)] + [abs(j - n / 2)]),
        "step": np.array(steps),
        "alternating": np.array([np.where(j // w % 2, 1.0, -1.0) * (1 + r * j / n) for w in (1, 2, 3, 5, 8, 16, 32) for r in (0, 1)]),
        "impulse": np.eye(n),
        "sparse": np.array([noise[0] * (rng.permutation(n) < k) for k in (2, 3, 5, 9, 17, 33) for _ in range(4)]),
        "one outlier": noise + outlier * np.eye(n)[::n // 8],
        "heavy tails": rng.standard_t(2, (16, n)),
        "Gaussian": rng.standard_normal((64, n)),
    }
    return {name: (x * (np.sqrt(n) / np.linalg.norm(x, axis=1, keepdims=True))).astype(np.float32) for name, x in blocks.items()}


def make_cases(n_waves: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (blocks, transform) for both block sizes."""
    return [(np.concatenate(list(families(n, n_waves).values())), hadamard(n)) for n in (BLOCK, SHORT)]


def score(signs: np.ndarray, cases: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the objective to minimize: the worst error plus means, which break ties. Short blocks vary more and have half the weight."""
    total = 0.0
    for (blocks, h), share in zip(cases, (1.0, 0.5)):
        nmse = errors((blocks * signs[: len(h)]) @ h)
        total += share * (nmse.max() + 0.2 * np.sort(nmse)[-len(nmse) // 20 :].mean() + nmse.mean())
    return total


def search(seconds: float, seed: int) -> np.ndarray:
    """Draw random signs for a quarter of the time, then flip one to three of the best; return float32 (256,)."""
    rng = np.random.default_rng(seed)
    coarse, fine = make_cases(24), make_cases(96)
    start = time.monotonic()
    candidates = []
    while time.monotonic() - start < seconds / 4:
        signs = rng.choice(np.float32([-1, 1]), BLOCK)
        candidates.append((score(signs, coarse), tuple(signs)))
    print(f"{len(candidates)} random patterns: {min(candidates)[0]:.4f} to {max(candidates)[0]:.4f}", flush=True)
    best = np.array(min(candidates)[1], np.float32)
    least, n_steps = score(best, fine), 0
    while time.monotonic() - start < seconds:
        new = best.copy()
        new[rng.choice(BLOCK, rng.integers(1, 4), replace=False)] *= -1
        n_steps += 1
        if (value := score(new, fine)) < least:
            best, least = new, value
    print(f"{n_steps} changes tried: {least:.4f}", flush=True)
    return best


def to_hex(signs: np.ndarray) -> str:
    """Format signs as in types.toml: bit j % 8 of byte j / 8 is set where sign j is negative."""
    return np.packbits(signs < 0, bitorder="little").tobytes().hex()


def from_hex(text: str) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def print_errors(signs: np.ndarray) -> None:
    """Print the NMSE of each family with and without the signs."""
    print("| family | blocks of 256: worst, mean | no signs | blocks of 64: worst, mean | no signs |\n|" + " --- |" * 5)
    blocks = {n: families(n, 256, seed=1) for n in (BLOCK, SHORT)}
    for name in blocks[BLOCK]:
        cells = []
        for n in (BLOCK, SHORT):
            for pattern in (signs[:n], np.ones(n, np.float32)):
                nmse = errors((blocks[n][name] * pattern) @ hadamard(n))
                cells.append(f"{nmse.max():.4f}, {nmse.mean():.4f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="duration of the search (default: 240)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="show the errors with the signs of types.toml")
    args = parser.parse_args()
    signs = from_hex(tomllib.loads(TABLE.read_text())["rotation"]["signs"]) if args.show else search(args.seconds, args.seed)
    print(to_hex(signs))
    print_errors(signs)


if __name__ == "__main__":
    sys.exit(run_script(main))
