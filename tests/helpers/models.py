"""Small GGUF files, and the path of the reference model."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ.get("GGML_EXT_TEST_MODEL", ROOT / "data" / "model-f16.gguf"))


def copy_field(writer: gguf.GGUFWriter, name: str, field: gguf.ReaderField, value=None) -> None:
    """Add an entry of another file's metadata, with another value unless it is None."""
    kind = field.types[0]
    writer.add_key_value(name, field.contents() if value is None else value, kind, field.types[1] if kind == gguf.GGUFValueType.ARRAY else None)


def copy_metadata(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, *left_out: str) -> None:
    """Add the metadata of another file, except empty arrays and keys with these prefixes."""
    for name, field in reader.fields.items():
        is_empty = not field.types or (field.types[0] == gguf.GGUFValueType.ARRAY and len(field.types) < 2)
        if not is_empty and not name.startswith(("GGUF.", "general.architecture", *left_out)):
            copy_field(writer, name, field)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, tensors: dict[str, np.ndarray], qtype: str = "F16", arch: str = "llama", fill=None) -> Path:
    """Write a GGUF file of float32 arrays stored as qtype (vectors as F32); fill(writer) adds metadata."""
    writer = gguf.GGUFWriter(path, arch)
    if fill:
        fill(writer)
    for name, values in tensors.items():
        target = gguf.GGMLQuantizationType[qtype if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), target), raw_dtype=target)
    finish(writer)
    return path


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    """Return float32 weights of realistic magnitude; shape in numpy's order."""
    return (0.02 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def read_tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def write_gpt2(path: Path, n_positions: int) -> Path:
    """Write a one-layer GPT-2 with learned positions and a byte vocabulary."""
    n, tokens = 256, ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(n_positions)
        writer.add_embedding_length(n)
        writer.add_block_count(1)
        writer.add_feed_forward_length(n)
        writer.add_head_count(2)
        writer.add_layer_norm_eps(1e-5)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * 256])

    rows = {"token_embd": len(tokens), "position_embd": n_positions}
    rows |= {f"blk.0.{name}": m for name, m in (("attn_qkv", 3 * n), ("attn_output", n), ("ffn_up", n), ("ffn_down", n))}
    tensors = {f"{name}.weight": gaussian(m, n, seed=i) for i, (name, m) in enumerate(rows.items())}
    tensors |= {f"{name}.bias": np.zeros(m) for name, m in rows.items() if name.startswith("blk.")}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors |= {f"{name}.weight": np.ones(n), f"{name}.bias": np.zeros(n)}
    return write_gguf(path, tensors, arch="gpt2", fill=fill)
