"""A model to write with interruptions, damage and parts, and the quantizer in this process."""

import contextlib
import subprocess

import pytest

from ggml_ext import quantize as program
from ggml_ext._commands import options
from ggml_ext._encode.codec import Codec
from ggml_ext._formats import chunks
from helpers.errors import check_error
from helpers.models import gaussian, write_gguf

NAMES = [f"blk.{i}.{part}.weight" for i in range(3) for part in ("attn_norm", "ffn_up", "ffn_down")]


@pytest.fixture
def source(tmp_path):
    """Write a model with matrices of two chunks; the weights of one are too small for DITTO3's scales."""
    tensors = {}
    for i, name in enumerate(NAMES):
        tensors[name] = gaussian(256, seed=i) if "norm" in name else gaussian(12, 512, seed=i) * (1e-9 if name == NAMES[2] else 1)
    return write_gguf(tmp_path / "in.gguf", tensors, "F32")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 6 * 512)


FLAGS = ("--type", "ditto3", "--importance", "none", "--fallback-above", "3", "-t", "2")


def run(capsys, *args, main=program.main) -> tuple[int, str, str]:
    """Run a command, by default the quantizer, and return exit code, standard output and standard error."""
    capsys.readouterr()
    code = main([str(a) for a in args])
    return code, *capsys.readouterr()


def run_successfully(capsys, *args, main=program.main) -> tuple[str, str]:
    code, out, err = run(capsys, *args, main=main)
    assert code == 0, err
    return out, err


def run_failing(capsys, *args, parts=(), code=1, main=program.main) -> str:
    exit_code, _, err = run(capsys, *args, main=main)
    check_error(subprocess.CompletedProcess([], exit_code, "", err), *parts, code=code)
    return err


@pytest.fixture
def small_parts(monkeypatch):
    """Return flags for parts of about three tensors of `source`."""
    monkeypatch.setattr(options, "parse_split_size", lambda text: 8000)
    return *FLAGS, "--split-max-size", "1M"


def part_files(directory) -> list:
    return [directory / f"out-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")]


@contextlib.contextmanager
def record_encoded(monkeypatch):
    """Record the names of the tensors that are encoded in the block."""
    names = []
    convert = Codec.convert

    def record_name(self, rows, tensor, *others):
        names.append(tensor.name)
        return convert(self, rows, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "convert", record_name)
        yield names


def is_only_output(out) -> bool:
    return [p.name for p in out.parent.iterdir() if "out" in p.name] == [out.name]
