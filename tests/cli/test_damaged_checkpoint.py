"""Checkpoint weights that are missing, truncated, damaged or pickled."""

import os
import struct

import numpy as np
import pytest

from helpers import checkpoint_folder
from helpers.checkpoint_files import tensors
from helpers.checkpoint_folder import read_weights

pytest.importorskip("torch", reason="the extra hf is not installed")
checkpoint, workspace = checkpoint_folder.checkpoint, checkpoint_folder.workspace  # fixtures


def test_missing_shard_is_refused(workspace):
    (workspace.source / "model-00002-of-00002.safetensors").unlink()
    workspace.error("lacks model-00002-of-00002.safetensors, of 2 files that model.safetensors.index.json names")
    (workspace.source / "model.safetensors.index.json").unlink()
    workspace.error("lacks model-00002-of-00002.safetensors, of 2 files with weights")
    (workspace.source / "model-00001-of-00002.safetensors").unlink()
    workspace.error("has a config.json and no model*.safetensors")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../other.safetensors"}}']
)
def test_damaged_index_is_refused(workspace, content):
    (workspace.source / "model.safetensors.index.json").write_text(content)
    workspace.error("model.safetensors.index.json", "download it again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "truncated: its tensors end at byte"),
        (lambda raw: raw[:100], "its header is truncated"),
        (lambda raw: b"", "is not a safetensors file"),
        (lambda raw: b"version https://git-lfs", "is not a safetensors file"),
        (lambda raw: struct.pack("<Q", 4) + b"oops", "the safetensors header is damaged"),
        (lambda raw: struct.pack("<Q", 8) + b'{"a": 1}', "the safetensors header is damaged"),
    ],
)
def test_damaged_shard_is_refused(workspace, change, message):
    shard = workspace.source / "model-00001-of-00002.safetensors"
    shard.write_bytes(change(shard.read_bytes()))
    workspace.error(shard.name, message, "download it again")


def as_bf16(value):
    import torch

    return torch.from_numpy(value).to(torch.bfloat16)


def pickle_weights(workspace, n_shards=1) -> None:
    """Replace the safetensors by pytorch_model.bin."""
    import torch

    values = {name: as_bf16(value) for name, value in tensors().items()}
    for path in workspace.source.glob("*.safetensors*"):
        path.unlink()
    for i in range(n_shards):
        name = "pytorch_model.bin" if n_shards == 1 else f"pytorch_model-{i + 1:05}-of-{n_shards:05}.bin"
        torch.save({key: value for k, (key, value) in enumerate(values.items()) if k % n_shards == i}, workspace.source / name)


@pytest.mark.slow
@pytest.mark.parametrize("n_shards", [1, 2])
def test_pickled_weights_are_converted(workspace, n_shards):
    pickle_weights(workspace, n_shards)
    workspace.run("--keep-gguf", workspace.path / "kept.gguf")
    kept = read_weights(workspace.path / "kept.gguf")
    expected = as_bf16(tensors()["model.layers.1.mlp.up_proj.weight"]).float().numpy()
    assert len(kept) == len(tensors()) and np.array_equal(kept["blk.1.ffn_up.weight"], expected)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.slow
def test_pickled_code_is_not_executed(workspace, monkeypatch):
    import torch

    pickle_weights(workspace)
    torch.save({"model.norm.weight": Evil()}, workspace.source / "pytorch_model.bin")
    monkeypatch.chdir(workspace.path)
    workspace.error("hold more than tensors, which could execute code", "pass a checkpoint with safetensors")
    assert not list(workspace.path.rglob("executed"))


def test_damaged_pickled_weights_are_refused(workspace):
    pickle_weights(workspace)
    path = workspace.source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:1000])
    workspace.error("pytorch_model.bin is not an archive of PyTorch 1.6 or newer, or is truncated: download it again")
