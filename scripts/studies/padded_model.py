#!/usr/bin/env python3
"""A llama model in F16 with its width padded by zeros to a multiple of 256, so that types of 256 weights can be compared on it.

    padded_model.py MODEL.gguf OUT.gguf [--dither SEED] [--no-pad]

Stock types below four bits fall back to 4.5 bits where rows are no multiple of 256; SmolLM2-135M-Instruct has rows of 576. Padded
to 768 it gives the same logits but for rounding: new heads of attention have keys, queries and values of zero, and as the root mean
square is taken over more values, epsilon and the squares of the gains take the part of the width that is in use. Groups of heads
stay as large as they were, so the padded width has to be a whole number of groups.

--dither: weights that come from Q4_1 get noise of up to half a step, uniform: another model, as good as the Q4_1 file, whose weights
are no longer levels that types of four and five bits can store exactly. --no-pad leaves the width as it is.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

from ggml_ext._base.errors import UserError
from ggml_ext._console.cli import run_script

BLOCK = 256


def pad(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(a, [(0, n - m) for m, n in zip(a.shape, shape, strict=True)])


def steps(t: gguf.ReaderTensor) -> np.ndarray:
    """Between the levels of each weight of a Q4_1 tensor, float32 of its shape: blocks of 32 are half d, half m and 16 bytes."""
    blocks = t.data.reshape(-1, 20)
    return np.repeat(blocks[:, :2].copy().view(np.float16).astype(np.float32), 32, axis=1).reshape(t.shape[::-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dither", type=int, metavar="SEED")
    parser.add_argument("--no-pad", action="store_true")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.model)
    value = {name: field.contents() for name, field in reader.fields.items()}
    if (arch := value.get("general.architecture")) != "llama":
        raise UserError(f"{args.model}: architecture {arch}; needed llama")
    width, heads, kv_heads = (value[f"llama.{k}"] for k in ("embedding_length", "attention.head_count", "attention.head_count_kv"))
    head, group = width // heads, heads // kv_heads
    padded = width if args.no_pad else -(-width // BLOCK) * BLOCK
    if padded % (head * group):
        raise UserError(f"{args.model}: a width of {padded} is no whole number of groups of {group} heads of {head}; no way to pad it")
    changed = {
        "embedding_length": padded, "attention.head_count": padded // head, "attention.head_count_kv": padded // head // group,
        "attention.layer_norm_rms_epsilon": value["llama.attention.layer_norm_rms_epsilon"] * width / padded,
    }
    sizes = {width: padded, kv_heads * head: padded // group}
    writer = gguf.GGUFWriter(args.out, arch)
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        elif not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name.removeprefix("llama."), value[name]), kind, sub)
    noise = np.random.default_rng(args.dither)
    for t in reader.tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        if args.dither is not None and t.tensor_type == gguf.GGMLQuantizationType.Q4_1:
            w += steps(t) * (noise.random(w.shape, np.float32) - np.float32(0.5))
        rows_too = not t.name.startswith(("token_embd", "output."))  # a vocabulary of the width's size is no width
        w = pad(w, tuple(sizes.get(n, n) if rows_too or i == w.ndim - 1 else n for i, n in enumerate(w.shape)))
        if t.name.endswith("_norm.weight"):
            w *= np.float32(np.sqrt(width / padded))
        writer.add_tensor(t.name, w if w.ndim == 1 else w.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{args.out}: width {width} padded to {padded}, {heads} heads to {padded // head}")


if __name__ == "__main__":
    sys.exit(run_script(main))
