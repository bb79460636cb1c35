"""Choosing types for a target: a small model, and the quantizer in this process with a fake llama-perplexity."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ggml_ext import quantize as program
from ggml_ext._allocation import error_measurement, target
from helpers.models import ROOT, gaussian, read_tensors, write_gguf

LAYERS = 4
SHAPES = {"attn_v": (15, 256), "ffn_up": (32, 256), "ffn_down": (16, 512)}
MATRICES = {
    f"blk.{i}.{name}.weight": gaussian(*shape, seed=10 * i + k) for i in range(LAYERS) for k, (name, shape) in enumerate(SHAPES.items())
} | {"token_embd.weight": gaussian(32, 256, seed=99), "blk.0.attn_norm.weight": gaussian(256)}
FREE = [name for name in MATRICES if "norm" not in name]
# The cost of an error: a factor for each class and one for each layer.
CLASS_COST, LAYER_COST = {"attn_v": 3.0, "ffn_up": 0.2, "ffn_down": 1.0}, (4.0, 1.0, 0.5, 2.0)
COSTS = {f"blk.{i}.{name}.weight": CLASS_COST[name] * LAYER_COST[i] for i in range(LAYERS) for name in SHAPES} | {"token_embd.weight": 1.5}
# Printed if nothing was measured before: the default types, which all fit rows of 256, and F16, the source's type.
ALL_TYPES_MEASURED = f"measuring errors: {len(target.DEFAULT_TYPES) + 1} types"


class Workspace:
    """A model, and the quantizer in this process with a fake llama-perplexity."""

    def __init__(self, path, monkeypatch, capsys):
        self.path, self.capsys = path, capsys
        self.model = write_gguf(path / "small-f16.gguf", MATRICES)
        self.out, self.log = path / "out" / "out.gguf", path / "log"
        self.cache = path / "out" / "small-f16.choice.json"
        self.out.parent.mkdir()
        fake = path / "llama-perplexity"
        search = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        fake.write_text(f"#!/bin/sh\nPYTHONPATH='{search}' exec '{sys.executable}' '{ROOT / 'tests' / 'helpers' / 'fake_perplexity.py'}' \"$@\"\n")
        fake.chmod(0o755)
        for key, value in (("MODEL", self.model), ("COSTS", json.dumps(COSTS)), ("LOG", self.log)):
            monkeypatch.setenv(f"FAKE_PERPLEXITY_{key}", str(value))
        monkeypatch.setattr(error_measurement, "find_tool", lambda name: fake)

    def run(self, *flags, code=0, source=None):
        """Run the quantizer, check its exit code, and return standard output and error."""
        importance = [] if any(str(f).startswith("--imatrix") for f in flags) else ["--importance", "none"]
        exit_code = program.main([str(source or self.model), str(self.out), "--force", "--threads", "2", *importance, *map(str, flags)])
        out, err = self.capsys.readouterr()
        assert exit_code == code, err
        return out, err

    def error(self, *flags):
        """Return the one error line; the run may leave only cached results."""
        _, err = self.run(*flags, code=1)
        (line,) = [line for line in err.splitlines() if not line.startswith(("note: ", "warning: "))]
        assert line.startswith("error: ") and {p.name for p in self.out.parent.iterdir()} <= {self.cache.name}
        return line

    def runs(self) -> list[list[str]]:
        """Return the tensors with errors in each run of llama-perplexity."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def types(self) -> dict[str, str]:
        return {name: t.tensor_type.name.lower() for name, t in read_tensors(self.out).items()}


@pytest.fixture
def fresh(tmp_path, monkeypatch, capsys, lib):
    """Return a workspace without cached results."""
    return Workspace(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def measurements(tmp_path_factory, lib):
    """Return the results that a run on the model caches."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        workspace = Workspace(tmp_path_factory.mktemp("measured"), monkeypatch, None)
        assert program.main([str(workspace.model), str(workspace.out), "--importance", "none", "--target-bpw", "4", "--quiet"]) == 0
        return workspace.cache.read_text()


@pytest.fixture
def workspace(fresh, measurements):
    """Return a workspace with the cached results of an earlier run."""
    fresh.cache.write_text(measurements)
    return fresh


def bits_per_weight(path):
    tensors = read_tensors(path).values()
    return 8 * sum(t.n_bytes for t in tensors) / sum(t.n_elements for t in tensors)
