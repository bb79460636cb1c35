#!/usr/bin/env python3
"""Write a synthetic model of one weight type for speed measurements: random weights with the block shapes of a real model.

    synth_model.py TYPE OUT.gguf [--shape llama-3.2-1b] [--layers 8]
    shapes: llama-3.2-1b, llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b, olmoe-1b-7b, kimi-k2, gpt-oss-20b, qwen2.5-0.5b; tiny, tiny-experts, tiny-ragged for tests

The row sizes of gpt-oss, Qwen and tiny-ragged are not all multiples of 256. Such rows get the type's fallback, as in `ggml-ext quantize`.

The model repeats 64 encoded rows, because encoding all rows takes minutes in some upstream types and speed does not depend on the values.
Embeddings and output are F16 in every type. The tokenizer, with its small vocabulary, is that of the reference model.
"""
from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import gguf
import numpy as np

import ggml_ext  # noqa: F401  registers the types in gguf
from ggml_ext._console.cli import run_script
from ggml_ext._formats.gguf_file import Tensor
from ggml_ext._formats.tensor_types import parse_type
from ggml_ext._native import library
from ggml_ext._plan.plan import Fallback, fit_to_row

ROOT = Path(__file__).resolve().parents[2]
# embedding size, feed-forward size (of an expert), head size, heads, key-value heads, experts, experts per token
SHAPES = {"llama-3.2-1b": (2048, 8192, 64, 32, 8, 0, 0), "llama-3.1-8b": (4096, 14336, 128, 32, 8, 0, 0),
          "llama-3.1-70b": (8192, 28672, 128, 64, 8, 0, 0), "qwen3-30b-a3b": (2048, 768, 128, 32, 4, 128, 8),
          "olmoe-1b-7b": (2048, 1024, 128, 16, 16, 64, 8), "kimi-k2": (7168, 2048, 128, 56, 8, 384, 8), "gpt-oss-20b": (2880, 2880, 64, 64, 8, 32, 4),
          "qwen2.5-0.5b": (896, 4864, 64, 14, 2, 0, 0),
          "tiny": (256, 512, 64, 4, 2, 0, 0), "tiny-experts": (256, 256, 64, 4, 2, 4, 2), "tiny-ragged": (320, 448, 64, 5, 1, 0, 0)}
DISTINCT_ROWS = 64


def write_model(type_name: str, out: Path, shape: str = "llama-3.2-1b", n_layers: int = 8) -> None:
    """Write the model, and report the rows that get a fallback; UserError if the type is unknown."""
    d, ff, head, n_head, n_kv, n_experts, n_used = SHAPES[shape]
    qtype = parse_type(type_name, "TYPE")
    lib = library.load()
    rng = np.random.default_rng(0)

    fallbacks: dict[Fallback, list[str]] = {}

    def choose_type(name: str, n_rows: int, n_per_row: int) -> gguf.GGMLQuantizationType:
        fitting = fit_to_row(Tensor(name, (n_per_row, n_rows), gguf.GGMLQuantizationType.F16, 0, 0), qtype)
        if fitting != qtype:
            fallbacks.setdefault(Fallback(n_per_row, qtype, fitting), []).append(name)
        return fitting

    @functools.cache  # layers share their bytes, because models may exceed memory
    def rows(n_rows: int, n_per_row: int, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
        base = (rng.standard_normal((DISTINCT_ROWS, n_per_row)) * 0.02).astype(np.float32)
        if qtype == gguf.GGMLQuantizationType.F16:
            encoded = base.astype(np.float16)
        else:
            encoded = lib.quantize(int(qtype), base, imatrix=np.ones(n_per_row, np.float32))
        return np.tile(encoded, (n_rows // DISTINCT_ROWS, 1))

    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(f"synthetic {shape} {type_name}")
    writer.add_context_length(4096)
    writer.add_embedding_length(d)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_kv)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    reader = gguf.GGUFReader(ROOT / "data" / "model-f16.gguf")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(n_vocab)

    writer.add_tensor("token_embd.weight", (rng.standard_normal((n_vocab, d)) * 0.02).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    matrices = {"attn_q": (n_head * head, d), "attn_k": (n_kv * head, d), "attn_v": (n_kv * head, d),
                "attn_output": (d, n_head * head), "ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(n_used)
    for layer in range(n_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(d, np.float32))
        for name, (n_rows, n_per_row) in matrices.items():
            is_expert = n_experts and name.startswith("ffn")
            full_name = f"blk.{layer}.{name}{'_exps' if is_expert else ''}.weight"
            row_type = choose_type(full_name, n_rows, n_per_row)
            if is_expert:
                experts = rows(n_experts * n_rows, n_per_row, row_type).reshape(n_experts, n_rows, -1)
                writer.add_tensor(full_name, experts, raw_dtype=row_type)
            else:
                writer.add_tensor(full_name, rows(n_rows, n_per_row, row_type), raw_dtype=row_type)
        if n_experts:
            router = (rng.standard_normal((n_experts, d)) * 0.02).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for fallback, names in fallbacks.items():
        print(fallback.describe(names), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    args = parser.parse_args()
    write_model(args.type, args.out, args.shape, args.layers)


if __name__ == "__main__":
    sys.exit(run_script(main))
