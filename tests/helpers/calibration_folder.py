"""A directory in which the quantizer calibrates with a fake llama-imatrix."""

from __future__ import annotations

import json
import os
import sys

import gguf
import pytest

from ggml_ext import quantize as program
from ggml_ext._calibration import calibration
from helpers.errors import files
from helpers.models import ROOT, gaussian, write_gguf

LAYERS = 4
MATRICES = {f"blk.{i}.ffn_{name}.weight": gaussian(8, n, seed=i) for i in range(LAYERS) for name, n in (("gate", 256), ("up", 256), ("down", 512))}


class Workspace:
    """A model, a text, and the quantizer in this process with the fake program."""

    def __init__(self, path, monkeypatch, capsys):
        self.path, self.capsys = path, capsys
        self.model = write_gguf(path / "small-f16.gguf", MATRICES)
        self.text, self.built_in = path / "some.txt", path / "calibration.txt"
        # Long enough for 100 chunks with one byte per token: the model has no vocabulary.
        self.text.write_text("Some words in a row. " * 3000)
        self.built_in.write_text("The text of the package. " * 3000)
        self.log, self.out = path / "log", path / "out" / "out.gguf"
        self.out.parent.mkdir()
        self.cache = path / "out" / "small-f16.imatrix.gguf"
        fake = path / "llama-imatrix"
        search = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        fake.write_text(f"#!/bin/sh\nPYTHONPATH='{search}' exec '{sys.executable}' '{ROOT / 'tests' / 'helpers' / 'fake_imatrix.py'}' \"$@\"\n")
        fake.chmod(0o755)
        monkeypatch.setenv("FAKE_IMATRIX_LOG", str(self.log))
        monkeypatch.setattr(calibration, "find_tool", lambda name: fake)
        monkeypatch.setattr(calibration, "TEXT", self.built_in)

    def run(self, *flags, code=0, type_name="ditto3", source=None):
        """Run the quantizer, not sequentially, check its exit code, and return standard output and error."""
        output_args = [] if "--dry-run" in flags else [str(self.out), "--force"]
        exit_code = program.main([str(source or self.model), *output_args, "--type", type_name, "--no-propagate", "--threads", "2", *map(str, flags)])
        out, err = self.capsys.readouterr()
        assert exit_code == code, err
        return out, err

    def error(self, *parts, flags=(), type_name="ditto3"):
        before = files(self.out.parent)
        _, err = self.run(*flags, code=1, type_name=type_name)
        (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert line.startswith("error: ") and all(part in line for part in parts), line
        assert files(self.out.parent) == before

    def runs(self) -> list[dict]:
        """Return the options of each run of llama-imatrix."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def fields(self) -> dict:
        return {key: field.contents() for key, field in gguf.GGUFReader(self.out).fields.items()}


@pytest.fixture
def workspace(tmp_path, monkeypatch, capsys, lib):
    return Workspace(tmp_path, monkeypatch, capsys)
