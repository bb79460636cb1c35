"""imatrix files and comparisons of quantized files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import gguf
import numpy as np

from ggml_ext._formats import gguf_file
from helpers.commands import tool
from helpers.models import finish, gaussian, read_tensors, write_gguf

UP, DOWN, EXPERTS = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.ffn_gate_exps.weight"


def importances(n_matrices: int, n_columns: int, seed: int = 3) -> np.ndarray:
    """Return realistic sums of squares: float32 over several orders of magnitude."""
    return np.random.default_rng(seed).lognormal(0, 2, (n_matrices, n_columns)).astype(np.float32)


def write_imatrix(path: Path, entries: dict, keys=True, datasets=("some/text.txt", "other"), chunks: int = 7) -> Path:
    """Write an imatrix file. entries: weight name -> (sums (n_matrices, n_columns), counts (n_matrices,) or None)."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    if keys:
        writer.add_array("imatrix.datasets", list(datasets))
        writer.add_uint32("imatrix.chunk_count", chunks)
        writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        if counts is not None:
            writer.add_tensor(f"{name}.counts", np.float32(counts).reshape(-1, 1))
    finish(writer)
    return path


def llama_quantize(source, output, type_name, *flags):
    subprocess.run([tool("llama-quantize"), *map(str, flags), source, output, type_name.upper()], check=True, capture_output=True)
    return output


def types_in_log(log: str) -> dict[str, str]:
    """Return the type of each tensor in the log of a dry run of llama-quantize."""
    lines = re.findall(r"^\[ *\d+/ *\d+\] +(\S+) +- \[.*?\], type = +(\w+), size = .*? MiB(?: -> .*\((\w+)\))?$", log, re.M)
    return {name: (after or before).lower() for name, before, after in lines}


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    expected, actual = read_tensors(theirs), read_tensors(ours)
    assert list(actual) and {n: t.tensor_type for n, t in actual.items()} == {n: t.tensor_type for n, t in expected.items()}
    for name, tensor in expected.items():
        assert np.array_equal(actual[name].data, tensor.data), name


def differing(a: Path, b: Path) -> set[str]:
    """Return the names of tensors whose bytes differ."""
    a, b = read_tensors(a), read_tensors(b)
    return {name for name in a if not np.array_equal(a[name].data, b[name].data)}


def moe_source(path: Path) -> Path:
    """Write a model that llama-quantize accepts: three experts of 40 rows, and rows of 320 that need a fallback."""
    def fill(writer):
        writer.add_context_length(64)
        writer.add_embedding_length(256)
        writer.add_block_count(1)
        writer.add_feed_forward_length(256)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)

    return write_gguf(path, {EXPERTS: gaussian(3, 40, 256), UP: gaussian(8, 320, seed=2), DOWN: gaussian(8, 256, seed=3)}, fill=fill)


def tensor_of(name, *ne):
    return gguf_file.Tensor(name, ne, gguf.GGMLQuantizationType.F16, 0, 0)
