"""A model whose writing tests can stop, damage and split, and the quantizer in this process."""

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
    """Matrices of two chunks; the second's weights are below what DITTO3's scales reach."""
    tensors = {}
    for i, name in enumerate(NAMES):
        tensors[name] = gaussian(256, seed=i) if "norm" in name else gaussian(12, 512, seed=i) * (1e-9 if name == NAMES[2] else 1)
    return write_gguf(tmp_path / "in.gguf", tensors, "F32")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 6 * 512)


FLAGS = ("--type", "ditto3", "--importance", "none", "--fallback-above", "3", "-t", "2")


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the quantizer."""
    capsys.readouterr()
    code = program.main([str(a) for a in args])
    return code, *capsys.readouterr()


def run_well(capsys, *args) -> tuple[str, str]:
    code, out, err = run(capsys, *args)
    assert code == 0, err
    return out, err


def run_badly(capsys, *args, parts=(), code=1) -> str:
    found, _, err = run(capsys, *args)
    check_error(subprocess.CompletedProcess([], found, "", err), *parts, code=code)
    return err


@pytest.fixture
def small_parts(monkeypatch):
    """Flags for parts of about three tensors of `source`."""
    monkeypatch.setattr(options, "parse_split_size", lambda text: 8000)
    return *FLAGS, "--split-max-size", "1M"


def part_files(folder) -> list:
    return [folder / f"out-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")]


@contextlib.contextmanager
def encoded(monkeypatch):
    """Names of the tensors that are encoded within it."""
    names = []
    convert = Codec.convert

    def note(self, rows, tensor, *others):
        names.append(tensor.name)
        return convert(self, rows, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "convert", note)
        yield names


def only_out(out) -> bool:
    return [p.name for p in out.parent.iterdir() if "out" in p.name] == [out.name]
