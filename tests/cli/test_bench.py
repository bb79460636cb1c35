"""ggml-ext bench on the reference model: its table, its temporary upstream files, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest

from ggml_ext import bench as program
from ggml_ext._commands.benching import choose_neighbours
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
def test_bench_prints_table_and_record(model):
    done = bench(model, "--stock", "q2_k,q3_k_m")
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("tg4", "pp8", "x Q2_K", "x Q3_K_M", "stock q2_k", "q.gguf"))
    assert os.listdir(model.parent) == ["q.gguf"]
    record = json.loads(bench(model, model.parent / "." / "q.gguf", "--stock", "q2_k", "--json").stdout)
    assert len(record["samples"]) == 2  # the same path twice is one model
    assert all(len(speeds) == 2 and min(speeds) > 0 for by in record["samples"].values() for speeds in by.values())
    ratio = next(row for row in record["summary"] if row["type"] == "stock q2_k")["decode/stock q2_k"]
    assert ratio == 1.0


@pytest.mark.slow
def test_second_model_replaces_upstream_files(model):
    done = bench(model, MODEL, "--stock", "none", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["summary"]
    assert rows[1][f"decode/{MODEL.name}"] == 1.0 and f"prefill/{MODEL.name}" in rows[0]


def test_upstream_types_of_similar_size_are_chosen(model):
    """3.6 bits per weight with the embeddings; F16 has no larger type."""
    assert choose_neighbours(open_model(model)) == ["q2_k", "q3_k_m"] and choose_neighbours(open_model(MODEL)) == ["q8_0"]


def test_ratio_is_the_median_over_rounds():
    """Speeds drift over time, but both speeds of a round drift alike."""
    rows = summarize_speed({"a": {"decode": [1.0, 10.0, 30.0]}, "b": {"decode": [2.0, 5.0, 60.0]}}, ["b"])
    assert rows[0]["decode/b"] == 0.5 and rows[0]["decode"] == 10.0


def test_bad_input_is_refused(model, tmp_path, monkeypatch):
    check_error(bench(tmp_path / "no.gguf"), "no.gguf")
    check_error(bench(model, "--stock", "q9_k"), "--stock: unknown type 'q9_k'", "q3_k_m")
    check_error(run_main(program.main, model, "-r", 0), "--rounds: got 0")
    fill_disk(monkeypatch, 1000)
    check_error(bench(model), "no space left on device", "--stock none")
    assert os.listdir(model.parent) == ["q.gguf"]
