#!/usr/bin/env python3
"""Errors of the types on blocks with structure, which a rotated type could gather into few values.

    families.py [--types itq3_t,itq3_s,itq2_t,q3_k,iq3_s,q2_k] [--json FILE] [--beside FILE]

Prints the largest relative squared error of a block of each family, and of all Gaussian blocks together in the last line.
Types of 64 weights a block see families of blocks of 64, all others of 256.
--beside takes the JSON of an earlier run, of another build (GGML_EXT_LIB_DIR), and shows its figures in brackets.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from ggml_ext import TYPES
from ggml_ext._base.types import MAX_BLOCK_SIZE
from ggml_ext._console.cli import run_script
from ggml_ext._native import library
from ggml_ext._plan.plan import parse_type


def families(n: int, n_waves: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Structured blocks by the name of their family, float32 (n_blocks, n), each of norm sqrt(n)."""
    j = np.arange(n)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((8, n))
    outlier = 10.0 ** np.arange(8)[:, None]
    steps = [np.where((j >= a) & (j < a + w), 1.0, 0.0) for w in (n // 16, n // 8, n // 4, n // 2) for a in range(0, n - w + 1, n // 16)]
    found = {
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
    return {name: (x * (np.sqrt(n) / np.linalg.norm(x, axis=1, keepdims=True))).astype(np.float32) for name, x in found.items()}


def block_errors(type_name: str, blocks: np.ndarray) -> np.ndarray:
    """Relative squared error of each block, float32 (n_blocks, n), as a row of its own; with flat importances."""
    qtype, lib = parse_type(type_name, "--types"), library.load()
    stored = lib.dequantize(int(qtype), lib.quantize(int(qtype), blocks, imatrix=np.ones(blocks.shape[1], np.float32)), blocks.shape[1])
    return ((stored.astype(np.float64) - blocks) ** 2).sum(1) / (blocks.astype(np.float64) ** 2).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="itq3_t,itq3_s,itq2_t,q3_k,iq3_s,q2_k")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path)
    args = parser.parse_args()
    types, of = args.types.split(","), {n: families(n, 64) for n in (MAX_BLOCK_SIZE, 64)}

    def error(type_name: str, family: str) -> float:
        n = TYPES[type_name].block_size if type_name in TYPES else MAX_BLOCK_SIZE
        errors = block_errors(type_name, of[n][family])
        return float(errors.mean() if family == "Gaussian" else errors.max())

    found = {family: {t: error(t, family) for t in types} for family in of[64]}
    before = json.loads(args.beside.read_text()) if args.beside else {}
    print(f"| family | {' | '.join(t.upper() for t in types)} |\n|" + " --- |" * (1 + len(types)))
    for name, row in found.items():
        old = before.get(name, {})
        print(f"| {name} | " + " | ".join(f"{e:.4f}" + (f" ({old[t]:.4f})" if t in old else "") for t, e in row.items()) + " |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(run_script(main))
