"""Models with layers that predict further tokens (MTP, NextN)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from helpers.models import copy_field, finish

MATRICES, NORMS = ("attn_output", "ffn_gate", "ffn_up", "ffn_down"), ("attn_norm", "ffn_norm")
MTP_NORMS = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")

Layer = Mapping[str, np.ndarray]  # by name, such as attn_q, the weights of an MTP layer


def append_mtp_layers(source: Path, out: Path, n_layers: int = 1) -> Path:
    """Append MTP layers to a model: copies of its last layer with attention, with a random projection of embeddings and hidden states."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    tensors = {t.name: t for t in reader.tensors}
    n = reader.fields[f"{arch}.block_count"].contents()
    width = reader.fields[f"{arch}.embedding_length"].contents()
    copied = max(i for i in range(n) if f"blk.{i}.attn_output.weight" in tensors)
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", f"{arch}.nextn_predict_layers") or not field.types:
            continue
        value = field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY and name.startswith(arch) and len(value) == n:
            value = value + [value[copied]] * n_layers
        if name == f"{arch}.block_count":
            value = n + n_layers
        copy_field(writer, name, field, value)
    writer.add_uint32(f"{arch}.nextn_predict_layers", n_layers)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    random = np.random.default_rng(1)
    for layer in range(n, n + n_layers):
        for name, tensor in tensors.items():
            if name.startswith(f"blk.{copied}."):
                writer.add_tensor(name.replace(f"blk.{copied}.", f"blk.{layer}."), tensor.data, raw_dtype=tensor.tensor_type)
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", (random.standard_normal((width, 2 * width)) / width**0.5).astype(np.float32))
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            writer.add_tensor(f"blk.{layer}.nextn.{norm}.weight", np.ones(width, np.float32))
    finish(writer)
    return out


def read_weights(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data) for t in reader.tensors}


def start_mtp_layer(weights: Mapping[str, np.ndarray], copied: int) -> dict[str, np.ndarray]:
    """Return an MTP layer: a copy of a layer, with the sum of the hidden state and half the embedding as its input."""
    n = len(weights["output_norm.weight"])
    layer = {name: weights[f"blk.{copied}.{name}.weight"].astype(np.float32) for name in (*MATRICES, *NORMS, "attn_q", "attn_k", "attn_v")}
    layer["nextn.eh_proj"] = np.concatenate((0.5 * np.eye(n), np.eye(n)), axis=1).astype(np.float32)
    layer |= {name: np.ones(n, np.float32) for name in MTP_NORMS[:2]}
    return layer | {MTP_NORMS[2]: weights["output_norm.weight"]}


def split_pairs(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows of each head from pairs of neighbours, which Llama rotates, to pairs of the first and the second half."""
    return weight.reshape(n_heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_with_mtp_layers(source: Path, out: Path, layers: Sequence[Layer]) -> Path:
    """Write a Llama model, whose embeddings are its output matrix too, with MTP layers, as MiMo 2, whose graph computes the same."""
    reader = gguf.GGUFReader(source)
    n, width, n_ff, n_heads, n_kv = (
        reader.fields[f"llama.{key}"].contents()
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
    )
    head, n_all, context = width // n_heads, n + len(layers), 1024
    numbers = {
        "context_length": context, "embedding_length": width, "feed_forward_length": n_ff, "block_count": n_all, "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv, "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "attention.sliding_window": context, "nextn_predict_layers": len(layers), "expert_count": 0, "expert_used_count": 0,
        "expert_feed_forward_length": n_ff,
    }
    writer = gguf.GGUFWriter(out, "mimo2")
    for key, value in numbers.items():
        writer.add_uint32(f"mimo2.{key}", value)
    writer.add_array("mimo2.attention.sliding_window_pattern", [i % 2 == 0 for i in range(n_all)])  # as wide as the context
    writer.add_layer_norm_rms_eps(1e-5)
    for key in ("freq_base", "freq_base_swa"):
        writer.add_float32(f"mimo2.rope.{key}", 10000.0)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, name, field)
    heads = {"attn_q": n_heads, "attn_k": n_kv}
    for name, values in (weights := read_weights(reader)).items():
        stem = name.split(".")[-2]
        writer.add_tensor(name, split_pairs(values, heads[stem]) if stem in heads else values)
    writer.add_tensor("output.weight", weights["token_embd.weight"])
    for i, layer in enumerate(layers, n):
        qkv = np.concatenate([split_pairs(layer["attn_q"], n_heads), split_pairs(layer["attn_k"], n_kv), layer["attn_v"]])
        for name, values in {"attn_qkv": qkv, **{name: layer[name] for name in (*MATRICES, "nextn.eh_proj")}}.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", values.astype(np.float16))
        for name in (*NORMS, *MTP_NORMS):
            writer.add_tensor(f"blk.{i}.{name}.weight", layer[name].astype(np.float32))
    finish(writer)
    return out
