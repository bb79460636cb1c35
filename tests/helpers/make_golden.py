#!/usr/bin/env python3
"""Write tests/data/golden_<type>.npz: blocks and their dequantized values, weights and their encoded blocks.

    make_golden.py TYPE [--force]

Replacing a golden file means a format break (decoder) or different output for every user (encoder).
"""
import argparse
from pathlib import Path

import numpy as np

from ggml_ext import TYPES
from ggml_ext._native import library

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("type", choices=TYPES)
parser.add_argument("--force", action="store_true")
args = parser.parse_args()
path = Path(__file__).parents[1] / "data" / f"golden_{args.type}.npz"
if path.exists() and not args.force:
    raise SystemExit(f"error: {path} exists; --force replaces it, which is a format break")

info, lib, rng = TYPES[args.type], library.load(), np.random.default_rng(160)
n = info.block_size
weights = np.concatenate([rng.standard_normal((6, n)), rng.standard_t(4, (4, n)), np.ones((1, n)), np.eye(n)[:1],
                          np.zeros((1, n))]).astype(np.float32)
encoded = lib.quantize(int(info.id), weights)
blocks = rng.integers(0, 256, (16, info.block_bytes), np.uint8)
# values of the first two halves of a block: ordinary, negative, subnormal, largest, zero
pairs = np.array([(1, 3.5), (-0.25, 3.5), (6e-8, 1), (65504, -1), (0, 3), (0.01, 65504), (2, -6e-8), (-1, -0.0)], np.float16)
blocks[:8, :4] = pairs.view(np.uint8)
blocks = np.concatenate([blocks, encoded])
valid = np.array([lib.validate(int(info.id), b[None]) for b in blocks])
blocks = blocks[valid]
np.savez_compressed(path, weights=weights, encoded=encoded, blocks=blocks, decoded=lib.dequantize(int(info.id), blocks, n))
print(f"{path}: {len(blocks)} blocks, {len(weights)} encoded")
