"""Random blocks and damaged GGUF files under address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from ggml_ext import WEIGHT_TYPES
from helpers.commands import quantize
from helpers.models import gaussian, write_gguf
from helpers.native import ASAN, require_built


def run_sanitized(name: str, *args) -> subprocess.CompletedProcess:
    result = subprocess.run([require_built(ASAN, name), *map(str, args)], capture_output=True, text=True, errors="replace", timeout=600,
                            env={"ASAN_OPTIONS": "allocator_may_return_null=1"})
    assert result.returncode == 0, f"{name} {args[:2]}: {result.stderr[-3000:]}"
    return result


@pytest.mark.parametrize("seed, n_rounds", [(0, 250), *(pytest.param(n, 1000, marks=pytest.mark.nightly) for n in (1, 2, 3))])
def test_random_blocks_decode_safely(seed, n_rounds):
    run_sanitized("fuzz-blocks", seed, n_rounds)


# The loader is the same for all types. These have blocks of different sizes, and DITTO3 a metadata key of its own.
BY_DAY = ("itq3_t", "ditto3", "ccq2", "itq2_t32")


@pytest.mark.parametrize("name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in sorted(WEIGHT_TYPES)])
def test_damaged_gguf_files_load_safely(tmp_path, name):
    """Damages every byte of the header in turn, then random bytes and lengths."""
    weights = gaussian(8, 512)
    source, intact = write_gguf(tmp_path / "in.gguf", {"token_embd.weight": weights, "blk.0.ffn_up.weight": weights}), tmp_path / "intact.gguf"
    quantize(source, intact, "--type", name, "--pure", "--token-embedding-type", name)
    rng, good = np.random.default_rng(3), np.frombuffer(intact.read_bytes(), np.uint8)
    header = len(good) - 2 * 8 * 512 // WEIGHT_TYPES[name].block_size * WEIGHT_TYPES[name].block_bytes
    damaged = []
    for i in range(1500):
        data = good.copy()
        position = i if i < header else rng.integers(0, len(good))
        data[position] ^= rng.integers(1, 256, dtype=np.uint8)
        if i % 5 == 0:
            data = data[: rng.integers(1, len(data))]
        damaged.append(tmp_path / f"{i}.gguf")
        damaged[-1].write_bytes(data.tobytes())
    assert run_sanitized("fuzz-gguf", intact).stdout == "1 files, 1 loaded\n"
    n_loaded = int(run_sanitized("fuzz-gguf", *damaged).stdout.split(", ")[1].split()[0])
    assert 0 < n_loaded < len(damaged)  # damaged weights or names load, most other damage is noticed
