"""GGUF files without weight matrices are refused by name; a file with the requested types is copied."""

import numpy as np
import pytest

from helpers.commands import quantize
from helpers.errors import quantize_error, raw_gguf
from helpers.models import gaussian, read_tensors, write_gguf

VECTOR, MATRIX = gaussian(256), gaussian(8, 256)


def with_type(name):
    return lambda writer: writer.add_type(name)


@pytest.mark.parametrize(
    ("tensors", "arch", "fill", "parts"),
    [
        ({"blk.0.attn_q.weight.lora_a": MATRIX, "blk.0.attn_q.weight.lora_b": MATRIX}, "llama", with_type("adapter"),
         ("a LoRA adapter", "general.type is adapter", "not a model")),
        ({"direction.1": VECTOR}, "controlvector", None, ("a control vector", "general.architecture is controlvector", "not a model")),
        ({"blk.0.attn_q.weight.in_sum2": MATRIX}, "llama", with_type("imatrix"), ("an imatrix", "--imatrix", "not a model")),
        ({"blk.0.attn_norm.weight": VECTOR, "output_norm.weight": VECTOR}, "llama", None, ("only vectors and small tensors (2)",)),
        ({"blk.0.ffn_gate_inp.weight": MATRIX}, "llama", None, ("only vectors and small tensors (1)", "weight matrices")),
    ],
    ids=["lora", "control_vector", "imatrix", "vectors", "routing"],
)
@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["", "dry_run"])
def test_file_without_matrices_is_refused_by_name(tmp_path, tensors, arch, fill, parts, flags):
    source = write_gguf(tmp_path / "in.gguf", tensors, "F32", arch, fill)
    quantize_error(tmp_path, source, "in.gguf", "nothing to quantize", *parts, flags=flags)


def test_vocabulary_is_refused(tmp_path):
    quantize_error(tmp_path, raw_gguf(tmp_path / "in.gguf"), "in.gguf has no tensors: nothing to quantize")


def test_file_with_the_requested_types_is_copied(tmp_path, lib):
    tensors = {"blk.0.ffn_up.weight": MATRIX, "blk.1.ffn_up.weight": gaussian(8, 256, seed=2), "blk.0.attn_norm.weight": VECTOR}
    source, once, twice = write_gguf(tmp_path / "in.gguf", tensors), tmp_path / "1.gguf", tmp_path / "2.gguf"
    assert quantize(source, once, "--type", "itq3_s").stderr == ""
    again = quantize(once, twice, "--type", "itq3_s")
    assert again.stderr == "warning: all 2 matrices already have the requested types: copied unchanged\n"
    assert "itq3_s as requested" in again.stdout
    first, second = read_tensors(once), read_tensors(twice)
    assert all(np.array_equal(first[name].data, second[name].data) for name in tensors)
    quantize_error(tmp_path, once, "blk.0.ffn_up.weight", "quantized to itq3_s", flags=["--tensor-type", "ffn_up=itq3_t", "--force"])
