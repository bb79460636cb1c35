"""Models with layers that predict further tokens (MTP, NextN)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from helpers.models import copy_field, finish


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
