"""ggml-ext bench on the reference model: its table, the stock files that it makes and removes, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest

from ggml_ext import bench as program
from ggml_ext._commands.benching import neighbours
from ggml_ext._evaluation.speed import summarize_speed
from ggml_ext._formats.split import open_model
from helpers.commands import quantize, run_main, tool
from helpers.errors import check_error, fill_disk
from helpers.models import MODEL


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tool("llama-bench")
    folder = tmp_path_factory.mktemp("bench")
    quantize(MODEL, folder / "q.gguf", "--type", "itq3_t", "--effort", "fast")
    return folder / "q.gguf"


def bench(*args):
    return run_main(program.main, *args, "-p", 8, "-n", 4, "-r", 2)


@pytest.mark.slow
def test_table_and_record(model):
    done = bench(model, "--stock", "q2_k,q3_k_m")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("write 4", "read 8", "x Q2_K", "x Q3_K_M", "stock q2_k", "q.gguf"))
    assert os.listdir(model.parent) == ["q.gguf"]
    found = json.loads(bench(model, model.parent / "." / "q.gguf", "--stock", "q2_k", "--json").stdout)
    assert len(found["samples"]) == 2  # one path twice is one model
    assert all(len(speeds) == 2 and min(speeds) > 0 for by in found["samples"].values() for speeds in by.values())
    ratio = next(row for row in found["summary"] if row["type"] == "stock q2_k")["decode/stock q2_k"]
    assert ratio == 1.0


@pytest.mark.slow
def test_a_second_model_takes_the_place_of_stock(model):
    done = bench(model, MODEL, "--stock", "none", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["summary"]
    assert rows[1][f"decode/{MODEL.name}"] == 1.0 and f"prefill/{MODEL.name}" in rows[0]


def test_neighbours_in_size(model):
    """3.6 bits a weight with the embeddings; F16 has no larger one."""
    assert neighbours(open_model(model)) == ["q2_k", "q3_k_m"] and neighbours(open_model(MODEL)) == ["q8_0"]


def test_ratios_are_of_rounds():
    """The median of ratios, not the ratio of medians: drift falls on both of a round."""
    rows = summarize_speed({"a": {"decode": [1.0, 10.0, 30.0]}, "b": {"decode": [2.0, 5.0, 60.0]}}, ["b"])
    assert rows[0]["decode/b"] == 0.5 and rows[0]["decode"] == 10.0


def test_bad_input(model, tmp_path, monkeypatch):
    check_error(bench(tmp_path / "no.gguf"), "no.gguf")
    check_error(bench(model, "--stock", "q9_k"), "--stock: unknown type 'q9_k'", "q3_k_m")
    check_error(run_main(program.main, model, "-r", 0), "--rounds: got 0")
    fill_disk(monkeypatch, 1000)
    check_error(bench(model), "no space left on device", "--stock none")
    assert os.listdir(model.parent) == ["q.gguf"]
