"""Upstream bugs that patches fix (docs/maintaining/upstream-bugs.md), through the programs that users run."""

from __future__ import annotations

import random
import string
import subprocess

import gguf
import numpy as np
import pytest

import synth_model
from helpers import architectures
from helpers.commands import tool
from helpers.models import read_tensors, write_gguf

ARRAY = gguf.GGUFValueType.ARRAY


def run_program(name: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([tool(name), *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture
def letters(tmp_path):
    """Write enough text for a chunk of 128 tokens in the vocabulary of helpers/architectures.py."""
    path = tmp_path / "letters.txt"
    path.write_text("".join(random.Random(1).choices(string.ascii_lowercase + " ", k=600)))
    return path


def test_imatrix_accepts_nodes_without_a_source(letters, tmp_path):
    (model,) = architectures.write_models("glm5-next", tmp_path)
    for options in ([], ["--moments", "block"]):
        done = run_program("llama-imatrix", "-m", model, "-f", letters, "-c", 128, "-t", 2, "-o", tmp_path / "imatrix.gguf", *options)
        assert done.returncode == 0, done.stderr[-1000:]
        assert any(name.startswith("blk.") for name in read_tensors(tmp_path / "imatrix.gguf"))


def layer_metadata(path) -> dict:
    return {name.removeprefix("llama."): f.contents() for name, f in gguf.GGUFReader(path).fields.items() if name.startswith("llama.")}


def write_layer_metadata(source, out, prefixes=("llama.",), **values):
    """Copy a model and set metadata of its architecture. prefixes: of the keys that are copied."""
    reader = gguf.GGUFReader(source)

    def fill(writer):
        for name, field in reader.fields.items():
            if name.startswith(prefixes) and name.removeprefix("llama.") not in values:
                writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[0] == ARRAY else None)
        for name, value in values.items():
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"llama.{name}", value)

    return write_gguf(out, {t.name: np.array(t.data) for t in reader.tensors}, "F32", fill=fill)


def test_pruning_layers_adapts_metadata(tmp_path, lib):
    """Removes layers 0 and 3 of six, two of which predict tokens. Arrays by layer, with and without those two and of every type, and
    numbers of layers follow. Lists of other lengths stay."""
    model, out = tmp_path / "model.gguf", tmp_path / "pruned.gguf"
    synth_model.write_model("f32", model, "tiny", 6)
    own = write_layer_metadata(
        model, tmp_path / "own.gguf",
        **{"attention.head_count": [4] * 6, "feed_forward_length": [512] * 6, "attention.recurrent_layers": [True, False, False, True, False, False],
           "swiglu_clamp_exp": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5], "attention.indexer.types": [7, 8, 9, 10], "leading_dense_block_count": 2,
           "nextn_predict_layers": 2, "rope.dimension_sections": [1, 2, 3, 4], "ple.layers": [1, 2, 4]})
    done = run_program("llama-quantize", "--prune-layers", "0,3", own, out, "F32")
    assert done.returncode == 0, done.stderr
    before = layer_metadata(own)
    assert {name: value for name, value in layer_metadata(out).items() if before[name] != value} == {
        "block_count": 4, "attention.head_count": [4] * 4, "feed_forward_length": [512] * 4, "attention.recurrent_layers": [False] * 4,
        "swiglu_clamp_exp": [1.5, 2.5, 4.5, 5.5], "attention.indexer.types": [8, 9], "leading_dense_block_count": 1}
    assert run_program("llama-quantize", "--prune-layers", "4", own, out, "F32").returncode == 0
    assert layer_metadata(out)["nextn_predict_layers"] == 1


def test_pruned_model_loads(letters, tmp_path, lib):
    model, out = tmp_path / "model.gguf", tmp_path / "pruned.gguf"
    synth_model.write_model("f32", model, "tiny", 4)
    own = write_layer_metadata(model, tmp_path / "own.gguf", ("llama.", "tokenizer."), **{"attention.head_count_kv": [2] * 4})
    assert run_program("llama-quantize", "--prune-layers", "2", own, out, "F32").returncode == 0
    done = run_program("llama-perplexity", "-m", out, "-f", letters, "-c", 64, "-b", 64, "--chunks", 1, "-t", 1)
    assert done.returncode == 0 and "Final estimate" in done.stdout + done.stderr, done.stderr[-1000:]
