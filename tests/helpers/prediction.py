"""A model with a multi-token prediction layer (MTP, NextN)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from helpers.models import copy_field, finish


def add_prediction_layer(source: Path, out: Path) -> Path:
    """Rewrite a Llama model as glm4moe with dense layers; a copy of the last layer becomes the prediction layer."""
    reader = gguf.GGUFReader(source)
    n, width, n_ff, n_head, n_kv = (
        reader.fields[f"llama.{key}"].contents()
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
    )
    head = width // n_head
    keys = {
        "context_length": 512, "embedding_length": width, "feed_forward_length": n_ff, "block_count": n + 1, "attention.head_count": n_head,
        "attention.head_count_kv": n_kv, "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
        "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": n_ff, "expert_shared_count": 1, "expert_gating_func": 2,
        "leading_dense_block_count": n + 1, "nextn_predict_layers": 1,
    }
    writer = gguf.GGUFWriter(out, "glm4moe")
    for key, value in keys.items():
        writer.add_uint32(f"glm4moe.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            copy_field(writer, key, field)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    for name, data in tensors.items():
        if not name.startswith("blk."):
            writer.add_tensor(name, data)
    for layer in range(n + 1):
        prefix = f"blk.{min(layer, n - 1)}."
        for name, data in tensors.items():
            if name.startswith(prefix):
                writer.add_tensor(f"blk.{layer}.{name.removeprefix(prefix).replace('ffn_norm', 'post_attention_norm')}", data)
        for name, size in (("q", width), ("k", n_kv * head), ("v", n_kv * head)):
            writer.add_tensor(f"blk.{layer}.attn_{name}.bias", np.zeros(size, np.float32))
    writer.add_tensor(f"blk.{n}.nextn.eh_proj.weight", np.tile(np.eye(width, dtype=np.float16), 2))
    for name in ("enorm", "hnorm", "shared_head_norm"):
        writer.add_tensor(f"blk.{n}.nextn.{name}.weight", np.ones(width, np.float32))
    finish(writer)
    return out
