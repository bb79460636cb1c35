#!/usr/bin/env python3
"""Convert a Llama model to F16 and pad its width with zeros to a multiple of 256, for types with blocks of 256 weights.

    padded_model.py MODEL.gguf OUT.gguf [--dither SEED] [--no-pad]

Upstream types below four bits fall back to 4.5 bits for rows that are not a multiple of 256. SmolLM2-135M-Instruct has rows of 576. Padded to
768, it computes the same logits except for rounding:

- The new attention heads have queries, keys and values of zero. Groups of heads keep their size, so the padded width must be a multiple of it.
- RMSNorm averages over more values. Its epsilon is scaled by the used share of the width, its gains by the square root of that share.

--dither adds uniform noise of up to half a step to weights from Q4_1. Otherwise types of four and five bits could store these weights exactly.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

from changed_model import write_changed
from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script

BLOCK = 256


def pad(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Append zeros up to the shape."""
    return np.pad(a, [(0, n - m) for m, n in zip(a.shape, shape, strict=True)])


def quantization_steps(t: gguf.ReaderTensor) -> np.ndarray:
    """Return the step d of each weight of a Q4_1 tensor. A block of 32 weights has half d, half m and 16 bytes of codes."""
    blocks = t.data.reshape(-1, 20)
    return np.repeat(blocks[:, :2].copy().view(np.float16).astype(np.float32), 32, axis=1).reshape(t.shape[::-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dither", type=int, metavar="SEED", help="add noise to weights from Q4_1")
    parser.add_argument("--no-pad", action="store_true", help="keep the width")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.model)
    value = {name: field.contents() for name, field in reader.fields.items()}
    if (arch := value.get("general.architecture")) != "llama":
        raise UserError(f"{args.model}: architecture {arch}; needed llama")
    width, heads, kv_heads = (value[f"llama.{k}"] for k in ("embedding_length", "attention.head_count", "attention.head_count_kv"))
    head, group = width // heads, heads // kv_heads
    padded = width if args.no_pad else -(-width // BLOCK) * BLOCK
    if padded % (head * group):
        raise UserError(f"{args.model}: the padded width {padded} must be a multiple of {head * group} ({group} heads of {head} in a group); choose another model")
    changed = {
        "llama.embedding_length": padded, "llama.attention.head_count": padded // head, "llama.attention.head_count_kv": padded // head // group,
        "llama.attention.layer_norm_rms_epsilon": value["llama.attention.layer_norm_rms_epsilon"] * width / padded,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
    }
    sizes = {width: padded, kv_heads * head: padded // group}
    noise = np.random.default_rng(args.dither)

    def pad_tensor(t: gguf.ReaderTensor) -> np.ndarray:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        if args.dither is not None and t.tensor_type == gguf.GGMLQuantizationType.Q4_1:
            w += quantization_steps(t) * (noise.random(w.shape, np.float32) - np.float32(0.5))
        pads_rows = not t.name.startswith(("token_embd", "output."))  # their rows are the vocabulary, whatever its size
        w = pad(w, tuple(sizes.get(n, n) if pads_rows or i == w.ndim - 1 else n for i, n in enumerate(w.shape)))
        if t.name.endswith("_norm.weight"):
            w *= np.float32(np.sqrt(width / padded))
        return w if w.ndim == 1 else w.astype(np.float16)

    write_changed(reader, args.out, ((t.name, pad_tensor(t)) for t in reader.tensors), changed)
    print(f"{args.out}: width {width} padded to {padded}, {heads} heads to {padded // head}")


if __name__ == "__main__":
    sys.exit(run_script(main))
