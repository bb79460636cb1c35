"""Choosing types for a target: a small model, and the quantizer in this process with a stand-in for llama-perplexity."""

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
# what an error costs: a factor for each class and one for each layer
OF_CLASS, OF_LAYER = {"attn_v": 3.0, "ffn_up": 0.2, "ffn_down": 1.0}, (4.0, 1.0, 0.5, 2.0)
COSTS = {f"blk.{i}.{name}.weight": OF_CLASS[name] * OF_LAYER[i] for i in range(LAYERS) for name in SHAPES} | {"token_embd.weight": 1.5}
# said where nothing was measured before: the default types, which rows of 256 can all have, and F16, the source's own
ALL_ANEW = f"measuring errors: {len(target.DEFAULT_TYPES) + 1} types"


class Folder:
    """A model, and the quantizer in this process with a stand-in for llama-perplexity."""

    def __init__(self, path, monkeypatch, capsys):
        self.path, self.capsys = path, capsys
        self.model = write_gguf(path / "small-f16.gguf", MATRICES)
        self.out, self.log = path / "out" / "out.gguf", path / "log"
        self.kept = path / "out" / "small-f16.choice.json"
        self.out.parent.mkdir()
        fake = path / "llama-perplexity"
        search = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        fake.write_text(f"#!/bin/sh\nPYTHONPATH='{search}' exec '{sys.executable}' '{ROOT / 'tests' / 'helpers' / 'fake_perplexity.py'}' \"$@\"\n")
        fake.chmod(0o755)
        for key, value in (("MODEL", self.model), ("COSTS", json.dumps(COSTS)), ("LOG", self.log)):
            monkeypatch.setenv(f"FAKE_PERPLEXITY_{key}", str(value))
        monkeypatch.setattr(error_measurement, "find_tool", lambda name: fake)

    def run(self, *flags, code=0, source=None):
        """Exit code checked; standard output and error."""
        importance = [] if any(str(f).startswith("--imatrix") for f in flags) else ["--importance", "none"]
        found = program.main([str(source or self.model), str(self.out), "--force", "--threads", "2", *importance, *map(str, flags)])
        out, err = self.capsys.readouterr()
        assert found == code, err
        return out, err

    def error(self, *flags):
        """The one line of it; nothing changed in the folder but kept results."""
        _, err = self.run(*flags, code=1)
        (line,) = [line for line in err.splitlines() if not line.startswith(("note: ", "warning: "))]
        assert line.startswith("error: ") and {p.name for p in self.out.parent.iterdir()} <= {self.kept.name}
        return line

    def runs(self) -> list[list[str]]:
        """The tensors with errors in each run of llama-perplexity so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def types(self) -> dict[str, str]:
        return {name: t.tensor_type.name.lower() for name, t in read_tensors(self.out).items()}


@pytest.fixture
def fresh(tmp_path, monkeypatch, capsys, lib):
    """Nothing was measured."""
    return Folder(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, lib):
    """What a run on the model keeps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = Folder(tmp_path_factory.mktemp("measured"), monkeypatch, None)
        assert program.main([str(folder.model), str(folder.out), "--importance", "none", "--target-bpw", "4", "--quiet"]) == 0
        return folder.kept.read_text()


@pytest.fixture
def folder(fresh, measured):
    """An earlier run measured what there is to measure."""
    fresh.kept.write_text(measured)
    return fresh


def bits_in_all(path):
    tensors = read_tensors(path).values()
    return 8 * sum(t.n_bytes for t in tensors) / sum(t.n_elements for t in tensors)
