"""llama.cpp's smaller programs on files with ggml-ext types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from helpers.commands import quantize, tool
from helpers.models import gaussian, read_tensors

TEXT = "def add(a, b):"
WEIGHT = "blk.0.attn_q.weight"


def run_program(name: str, *args) -> str:
    """Run a program, which must succeed, and return its standard output."""
    done = subprocess.run([tool(name), *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "model-itq3_t.gguf"
    quantize(model, path, "--type", "itq3_t", "--effort", "fast")
    return path


def test_tokenize_matches_the_source(model, quantized):
    tokens, source_tokens = (run_program("llama-tokenize", "-m", path, "-p", TEXT, "--ids", "--log-disable") for path in (quantized, model))
    assert tokens == source_tokens and len(json.loads(tokens)) > 3


def test_embedding_stays_close_to_the_source(model, quantized):
    """The embedding of the quantized file is closer to the source's than that of another text."""
    def embed(path: Path, text: str) -> np.ndarray:
        output = run_program("llama-embedding", "-m", path, "-p", text, "--pooling", "mean", "--embd-output-format", "json", "-t", 1, "--log-verbosity", 0)
        return np.array(json.loads(output)["data"][0]["embedding"])

    one, same, other = embed(model, TEXT), embed(quantized, TEXT), embed(model, "import os")
    assert one @ one == pytest.approx(1, abs=1e-3) and one @ same > 0.95 and one @ same > one @ other


def test_batched_bench_runs(quantized):
    output = run_program("llama-batched-bench", "-m", quantized, "-c", 128, "-npp", 16, "-ntg", 4, "-npl", "1,2", "-t", 1, "--output-format", "jsonl")
    assert [json.loads(line)["pl"] for line in output.splitlines() if line.startswith("{")] == [1, 2]


def test_export_lora_merges_into_ggml_ext_types(quantized, tmp_path):
    tensor = read_tensors(quantized)[WEIGHT]
    (n_in, n_out), rank, alpha = map(int, tensor.shape), 4, 8.0
    a, b = gaussian(rank, n_in), gaussian(n_out, rank, seed=2)
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", gguf.GGUFReader(quantized).get_field("general.architecture").contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in (("lora_a", a), ("lora_b", b)):
        writer.add_tensor(f"{WEIGHT}.{name}", values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    run_program("llama-export-lora", "-m", quantized, "--lora", tmp_path / "adapter.gguf", "-o", tmp_path / "merged.gguf", "-t", 1)
    merged = read_tensors(tmp_path / "merged.gguf")[WEIGHT]
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type) + alpha / rank * b @ a
    assert merged.tensor_type == gguf.GGMLQuantizationType.F16
    assert np.abs(merged.data.astype(np.float32) - expected).max() < 2e-3 * np.abs(expected).max()
