"""Threads: -t says how many, and numpy's BLAS adds none of its own."""

from __future__ import annotations

import pytest

from ggml_ext import export, inspect, quantize
from ggml_ext._encode.accuracy import Accuracy
from ggml_ext._native import blas as _blas
from helpers.models import gaussian, write_gguf


@pytest.fixture
def blas():
    """The functions that return and set the number of threads, which is 2 meanwhile."""
    found = _blas.openblas_threads()
    if found is None:
        pytest.skip("numpy has another BLAS than OpenBLAS")
    before = found[0]()
    found[1](2)
    yield found
    found[1](before)


def test_the_programs_take_no_threads_of_blas(blas, lib, tmp_path, monkeypatch, capsys):
    """Where errors are measured, in the threads of -t."""
    source, ours, stock = (tmp_path / f"{name}.gguf" for name in ("in", "ours", "stock"))
    write_gguf(source, {"blk.0.ffn_up.weight": gaussian(8, 512)})
    measure, seen = Accuracy.measure, []

    def note(*args):
        seen.append(blas[0]())
        return measure(*args)

    monkeypatch.setattr(Accuracy, "measure", staticmethod(note))
    for program, *args in (
        (quantize, source, ours, "--type", "itq3_s", "--importance", "none"), (export, ours, stock, "--type", "q8_0"),
        (inspect, ours, "--against", source),
    ):
        seen.clear()
        assert program.main([*map(str, args)]) == 0, capsys.readouterr().err
        assert seen and set(seen) == {1} and blas[0]() == 2


def test_the_number_is_set_again_after_an_error(blas, tmp_path, capsys):
    assert quantize.main([str(tmp_path / "missing.gguf"), str(tmp_path / "out.gguf"), "--type", "itq3_s"]) == 1
    assert "missing.gguf" in capsys.readouterr().err and blas[0]() == 2


def test_programs_side_by_side(blas):
    """In threads of one process: the number is set again when the last has ended, whichever that is."""
    first, second = _blas.one_blas_thread(), _blas.one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas[0]() == 1
    second.__exit__(None, None, None)
    assert blas[0]() == 2
