"""Calibration layer by layer, against llama-imatrix on the same text."""

import subprocess

import gguf
import numpy as np
import pytest

import synth_model
from ggml_ext._base.console import Console
from ggml_ext._calibration import by_layer
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._formats.hessians import KIND, OWNERS, VALUES, WEIGHTS, HessianFile, kind_for
from ggml_ext._formats.imatrix import ImportanceMatrix
from helpers.commands import tool
from helpers.models import read_tensors
from helpers.native import F32_U

CONTEXT = 64


def write_model(folder, shape):
    path = folder / "m.gguf"
    synth_model.write_model("f16", path, shape, 2)
    for t in gguf.GGUFReader(path, "r+").tensors:  # its experts are equal
        if t.name.endswith("ffn_up_exps.weight"):
            t.data[:] *= np.arange(1, 1 + len(t.data), dtype=np.float16)[:, None, None]
    return path


def collect(model, text, out, kind, full_columns) -> None:
    command = by_layer.list_command(model, text, n_context=CONTEXT, n_chunks=3, n_threads=2)
    by_layer.collect_by_layer(command, out, lambda n: kind_for(n, kind, full_columns), n_threads=2, title="layers", console=Console())


def run_llama_imatrix(model, text, out, kind, full_columns) -> None:
    command = [tool("llama-imatrix"), "-m", model, "-f", text, "-c", CONTEXT, "-b", CONTEXT, "--chunks", 3, "-t", 2, "--moments", kind, "-o", out]
    command += ["--moments-columns", full_columns] if full_columns else []
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(("shape", "kind", "full_columns"), [
    ("tiny", "full", None), ("tiny", "full", 256), ("tiny-experts", "full", None), ("tiny-experts", "block", None), ("tiny-ragged", "block", None),
])
def test_file_equals_that_of_llama_imatrix(shape, kind, full_columns, text, tmp_path, float32_sums):
    """The same entries, if the sums are not in BF16; those of n tokens in float32 in another order differ by n roundings each way, of products of norms sqrt(H_ii H_jj)."""
    model = write_model(tmp_path, shape)
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    collect(model, text, ours, kind, full_columns)
    run_llama_imatrix(model, text, theirs, kind, full_columns)
    files = [GGUFFile(p) for p in (ours, theirs)]
    owners = [dict(zip(f.strings(WEIGHTS), f.strings(OWNERS), strict=True)) for f in files]
    assert owners[0] == owners[1] and files[0].value(KIND) == files[1].value(KIND) and len(ImportanceMatrix(ours)) == len(owners[0])
    actual, expected = (read_tensors(p) for p in (ours, theirs))
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        a, b = (np.asarray(tensor.data, np.float64).ravel() for tensor in (actual[name], t))
        assert a.shape == b.shape, name
        if "count" in name:
            assert np.array_equal(a, b), name
        else:  # no value exceeds the largest on the diagonal
            assert np.abs(a - b).max() <= 2 * 3 * CONTEXT * F32_U * b.max(), name
    assert any(name.endswith(VALUES) for name in expected) and HessianFile([files[0]]).kind == kind


def test_obstacle_is_the_message_of_the_program(text, tmp_path):
    model = write_model(tmp_path, "tiny")
    assert by_layer.find_obstacle(GGUFFile(model), text, False) == ""
    short = tmp_path / "short.txt"
    short.write_text("x")
    assert "tokens, but a chunk takes 32" in by_layer.find_obstacle(GGUFFile(model), short, False)
