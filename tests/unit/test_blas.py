"""Threads: -t sets their number, and numpy's BLAS adds none."""

from __future__ import annotations

import pytest

from ggml_ext import export, inspect, quantize
from ggml_ext._encode.accuracy import Accuracy
from ggml_ext._native import blas as _blas
from helpers.models import gaussian, write_gguf


@pytest.fixture
def blas():
    """Return BLAS's functions that get and set its threads, set to 2 during the test."""
    functions = _blas.openblas_threads()
    if functions is None:
        pytest.skip("numpy has another BLAS than OpenBLAS")
    before = functions[0]()
    functions[1](2)
    yield functions
    functions[1](before)


def test_commands_limit_blas_to_one_thread(blas, lib, tmp_path, monkeypatch, capsys):
    """Checked where the threads of -t measure errors."""
    source, quantized, stock = (tmp_path / f"{name}.gguf" for name in ("in", "ours", "stock"))
    write_gguf(source, {"blk.0.ffn_up.weight": gaussian(8, 512)})
    measure, thread_counts = Accuracy.measure, []

    def note(*args):
        thread_counts.append(blas[0]())
        return measure(*args)

    monkeypatch.setattr(Accuracy, "measure", staticmethod(note))
    for program, *args in (
        (quantize, source, quantized, "--type", "itq3_s", "--importance", "none"), (export, quantized, stock, "--type", "q8_0"),
        (inspect, quantized, "--against", source),
    ):
        thread_counts.clear()
        assert program.main([*map(str, args)]) == 0, capsys.readouterr().err
        assert thread_counts and set(thread_counts) == {1} and blas[0]() == 2


def test_threads_are_restored_after_an_error(blas, tmp_path, capsys):
    assert quantize.main([str(tmp_path / "missing.gguf"), str(tmp_path / "out.gguf"), "--type", "itq3_s"]) == 1
    assert "missing.gguf" in capsys.readouterr().err and blas[0]() == 2


def test_threads_are_restored_after_the_last_command(blas):
    """Commands may run in threads of one process and end in any order."""
    first, second = _blas.one_blas_thread(), _blas.one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas[0]() == 1
    second.__exit__(None, None, None)
    assert blas[0]() == 2
