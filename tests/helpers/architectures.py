"""Small models of llama.cpp's architectures, as its test-llama-archs writes them with random weights, with a vocabulary of characters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf

from helpers.models import copy_metadata, finish
from helpers.native import BUILD, require_built

BASE = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127)), "\u2581"]


def write_models(architecture: str, directory: Path) -> list[Path]:
    """Write the models of an architecture, or of all ("all"), except those without token embeddings."""
    raw = directory / "raw"
    raw.mkdir()
    selection = [] if architecture == "all" else ["-a", architecture]
    # a fixed seed, as the gradients of some random models are within the noise of their finite differences
    subprocess.run([require_built(BUILD, "test-llama-archs"), *selection, "-s", "1", "-o", f"{raw}/"], check=True, capture_output=True, timeout=300)
    return [add_vocabulary(path, directory / path.name) for path in sorted(raw.glob("*.gguf")) if has_embeddings(path)]


def has_embeddings(path: Path) -> bool:
    return any(t.name == "token_embd.weight" for t in gguf.GGUFReader(path).tensors)


def add_vocabulary(source: Path, out: Path) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    copy_metadata(writer, reader, "tokenizer.")
    n = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*BASE, *(f"token{i}" for i in range(len(BASE), n))][:n])
    writer.add_token_scores([0.0] * n)
    writer.add_token_types([2, 3, 3, *[1] * (n - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return out
