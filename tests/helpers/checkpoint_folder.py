"""A copy of a checkpoint that tests may change, and the quantizer in this process."""

import json
import shutil

import gguf
import numpy as np
import pytest

from ggml_ext import quantize as program
from helpers.checkpoint_files import CONFIG, write_checkpoint
from helpers.errors import files
from helpers.hub_client import REPO

NAME = REPO.partition("/")[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("hub") / NAME, n_shards=2)


class Workspace:
    """The quantizer in this process; source is a copy of the checkpoint that a test may change."""

    def __init__(self, path, checkpoint, capsys):
        self.path, self.capsys, self.source = path, capsys, path / "source"
        shutil.copytree(checkpoint, self.source)
        self.out = path / "results" / "out.gguf"
        self.out.parent.mkdir()

    def run(self, *flags, code=0):
        exit_code = program.main([str(self.source), str(self.out), "--type", "itq3_s", "--importance", "none", *map(str, flags)])
        err = self.capsys.readouterr().err
        assert exit_code == code, err
        return err

    def error(self, *parts, flags=(), code=1):
        before = files(self.path), files(self.out.parent)
        (line,) = [line for line in self.run(*flags, code=code).splitlines() if not line.startswith("note: ")]
        assert line.startswith("error: ") and "unexpected" not in line and all(part in line for part in parts), line
        assert (files(self.path), files(self.out.parent)) == before

    def config(self, **changes):
        (self.source / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.fixture
def workspace(tmp_path, checkpoint, capsys):
    return Workspace(tmp_path, checkpoint, capsys)


def read_weights(path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
