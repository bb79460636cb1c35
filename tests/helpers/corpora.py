"""Blocks for encoders and decoders."""

from __future__ import annotations

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

import numpy as np

from ggml_ext.quants import BLOCK_SIZE
from helpers.native import ROOT


def sylvester(n: int) -> np.ndarray:
    """Return H by its definition, float64: H[i][j] = (-1)^popcount(i & j)/sqrt(n)."""
    i = np.arange(n)
    bits = (i[:, None] & i[None, :])
    return (1 - 2 * (np.array([bin(v).count("1") for v in bits.ravel()]).reshape(n, n) % 2)) / np.sqrt(n)


def rotation(n: int) -> np.ndarray:
    """Return R = H S by its definition, float64, with the first n signs of types.toml."""
    words = int.from_bytes(bytes.fromhex(tomllib.loads((ROOT / "ggml_ext" / "types.toml").read_text())["rotation"]["signs"]), "little")
    return sylvester(n) * np.array([-1.0 if words >> j & 1 else 1.0 for j in range(n)])


SEED = 20240611


def corpora(block_size: int = BLOCK_SIZE) -> dict[str, np.ndarray]:
    """Return float32 blocks (n_blocks, block_size) by name: usual weights and every unusual shape of a block."""
    rng = np.random.default_rng(SEED)
    n = 512
    gaussian = rng.standard_normal((n, block_size))
    spread = 10.0 ** rng.uniform(-45, 38, (n, 1))
    with np.errstate(over="ignore", under="ignore"):
        corpus = {
            "gaussian": gaussian,
            "student": rng.standard_t(4, (n, block_size)),
            "constant": np.ones((n, block_size)) * rng.standard_normal((n, 1)),
            "zero": np.zeros((4, block_size)),
            "minus_zero": np.where(rng.random((n, block_size)) < 0.9, -0.0, rng.integers(-1, 2, (n, block_size))),
            "one_hot": np.eye(block_size) * rng.standard_normal((block_size, 1)),
            "huge": np.clip(gaussian * spread, -3e38, 3e38),
            "subnormal": gaussian * 1e-40,
            "half_subnormal": gaussian * 10.0 ** rng.uniform(-8, -4, (n, 1)),
            "integers": rng.integers(-2, 3, (n, block_size)),
            "offset": gaussian + 100 * rng.standard_normal((n, 1)),
            "outliers": gaussian * np.where(rng.random((n, block_size)) < 0.01, 50, 1),
            "not_finite": np.where(
                rng.random((n, block_size)) < 0.5 / block_size, rng.choice([np.nan, np.inf, -np.inf], (n, 1)), gaussian
            ),
        }
        return {name: x.astype(np.float32) for name, x in corpus.items()}


CORPORA = corpora()
