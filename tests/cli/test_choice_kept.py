"""Targets: what was measured is kept for the next run, whole or in part, and what is kept of others is not used."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ggml_ext._allocation import choice_record as results
from ggml_ext._allocation import sensitivity
from ggml_ext._allocation.error_measurement import ErrorMeasurement
from ggml_ext._base.signals import StopRequest
from helpers import choosing
from helpers.choosing import ALL_ANEW, FREE, LAYERS, SHAPES, bits_in_all

fresh, measured, folder = choosing.fresh, choosing.measured, choosing.folder


def test_a_second_target_uses_what_was_measured(folder, measured):
    _, err = folder.run("--target-kld", "0.05")
    assert not folder.runs() and err.count("reusing cached") == 2 and folder.kept.read_text() == measured
    _, err = folder.run("--target-bpw", "3", "--target-types", "itq2_t,q2_k,q4_k")
    assert not folder.runs() and "measuring errors: 1 type," in err  # q2_k
    assert set(folder.types().values()) <= {"itq2_t", "q2_k", "q4_k", "f32"} and bits_in_all(folder.out) <= 3
    assert len(json.loads(folder.kept.read_text())["errors"][FREE[0]]) == len(json.loads(measured)["errors"][FREE[0]]) + 1


@pytest.mark.parametrize("change", ["half", "a list", "another model", "another effort"])
def test_what_is_kept_of_others_or_damaged_is_not_used(folder, measured, change):
    contents = {"half": measured[: len(measured) // 2], "a list": "[]", "another model": measured.replace('"sha256": "', '"sha256": "0')}
    content = contents.get(change, measured)
    folder.kept.write_text(content)
    _, err = folder.run("--target-bpw", "4", "--dry-run", *(["--effort", "fast"] if change == "another effort" else []))
    assert "reusing cached" not in err and ALL_ANEW in err and folder.kept.read_text() == content


def change(measured: str, *path, value) -> str:
    """The kept results with another value at a place; keys and indices lead there."""
    kept = json.loads(measured)
    inside = kept
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return json.dumps(kept)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("errors", FREE[1], "q4_k"), "0.01"), (("errors", FREE[1], "q4_k"), float("nan")), (("errors", FREE[1], "q4_k"), -0.01),
        (("errors", FREE[1], "q4_k"), True), (("errors", FREE[1], "q4_k"), 10**400), (("errors", FREE[1]), [0.1, 0.2]), (("errors",), [1]),
        (("probe_errors", FREE[1]), "0.06"), (("probe_errors", FREE[1]), float("nan")), (("probe_errors",), FREE),
        (("costs", 0, 2), "0.1"), (("costs", 0, 2), float("inf")), (("costs", 0), ["blk.0"]), (("costs", 0, 1), FREE[0]),
        (("costs", 0, 1), ["blk.9.attn_v.weight"]), (("costs", 0, 0), 3), (("costs",), {}), (("costs",), 7), (("text",), []),
        (("format",), "1"), (("more",), 1),
    ],
    ids=lambda v: str(v)[:30],
)
def test_kept_results_with_values_of_the_wrong_kind_are_not_used(folder, measured, path, value):
    content = change(measured, *path, value=value)
    folder.kept.write_text(content)
    _, err = folder.run("--target-bpw", "4", "--dry-run")
    assert "reusing cached" not in err and ALL_ANEW in err and folder.kept.read_text() == content


def test_kept_results_that_are_nested_too_deeply_are_not_used(folder):
    folder.kept.write_text("[" * 100_000)
    assert ALL_ANEW in folder.run("--target-bpw", "4", "--dry-run")[1]


def test_costs_below_nothing_and_errors_without_end_are_used(folder, measured):
    """Noise may say the one of a cost; zeros that are stored as something else have the other."""
    content = change(change(measured, "costs", 0, 2, value=-1e-5), "errors", FREE[1], "itq2_t", value=float("inf"))
    folder.kept.write_text(content)
    assert folder.run("--target-bpw", "4", "--dry-run")[1].count("reusing cached") == 2


def test_an_interrupt_keeps_the_errors_that_are_measured(fresh, monkeypatch):
    folder, sample, done = fresh, ErrorMeasurement._measure_sample, []

    def stop(self, tensor, *others):
        if tensor.name == FREE[-1] and not done:
            done.append(tensor.name)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the main thread hears of it
        return sample(self, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(ErrorMeasurement, "_measure_sample", stop)
        _, err = folder.run("--target-bpw", "4", "--sensitivity", "usual", code=128 + signal.SIGTERM)
    assert "error: interrupted" in err
    kept = json.loads(folder.kept.read_text())["errors"]
    assert kept and set(kept) < set(FREE) and {p.name for p in folder.out.parent.iterdir()} == {folder.kept.name}
    _, err = folder.run("--target-bpw", "4", "--sensitivity", "usual")
    assert f"rows of {len(FREE) - len(kept)} tensors" in err


PARTS = [[n for n in FREE if name in n] for name in (*SHAPES, "token_embd")] + [[n for n in FREE if f"blk.{i}." in n] for i in range(LAYERS)]
# A run that is killed as its 8th tensor or its 4th part begins: of those before the first at least has its place in the file by then,
# as the thread begins a tensor when the one two before it is dealt with.
KILL = """
import os, signal, sys
from pathlib import Path
from ggml_ext import quantize
from ggml_ext._allocation import error_measurement, sensitivity
from ggml_ext._allocation.error_measurement import ErrorMeasurement
tensors, parts = set(), []
sample, kld = ErrorMeasurement._measure_sample, sensitivity.Probe._kld
def note(done, limit):
    if len(done) == limit:
        os.kill(os.getpid(), signal.SIGKILL)
def sample_error(self, tensor, *others):
    tensors.add(tensor.name)
    note(tensors, 8)
    return sample(self, tensor, *others)
def measure(self, *args):
    parts.append(args)
    note(parts, 4)
    return kld(self, *args)
error_measurement.find_tool = lambda name: Path(sys.argv[1])
ErrorMeasurement._measure_sample, sensitivity.Probe._kld = sample_error, measure
sys.exit(quantize.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_the_same_end(fresh):
    """No part is measured twice."""
    folder = fresh
    folder.run("--target-bpw", "4", "--threads", "1")
    expected, kept, runs = folder.out.read_bytes(), folder.kept.read_text(), folder.runs()
    for path in (folder.out, folder.kept, folder.log):
        path.unlink()
    command = [sys.executable, "-c", KILL, folder.path / "llama-perplexity", folder.model, folder.out, "--importance", "none"]
    command += ["--target-bpw", "4", "--threads", "1"]
    codes, before = [], ""
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(subprocess.run([*map(str, command)], capture_output=True, timeout=120).returncode)
        now = folder.kept.read_text()
        assert now != before or codes[-1] == 0, "a run kept nothing"
        before = now
    assert codes[-1] == 0 and 4 <= len(codes) <= 12  # 13 tensors and 8 parts; on a slow machine one of them a run
    assert folder.out.read_bytes() == expected and folder.kept.read_text() == kept
    assert [r for r in folder.runs() if r] == [r for r in runs if r] == PARTS


@pytest.fixture
def half(fresh, monkeypatch):
    """An interrupt came after three parts."""
    kld, count = sensitivity.Probe._kld, []

    def stop(self, *args):
        count.append(args)
        if len(count) == 4:
            raise StopRequest(signal.SIGINT)
        return kld(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity.Probe, "_kld", stop)
        fresh.run("--target-bpw", "4", code=128 + signal.SIGINT)
    assert fresh.runs() == [[], *PARTS[:3]] and {p.name for p in fresh.out.parent.iterdir()} == {fresh.kept.name}
    return fresh


def test_an_interrupt_keeps_the_parts_that_are_measured(half, measured):
    assert [name for name, *_ in json.loads(half.kept.read_text())["costs"]] == [name for name, *_ in json.loads(measured)["costs"]][:3]
    # three parts are not taken for all
    _, err = half.run("--target-bpw", "4", "--dry-run")
    assert "using the sensitivities of another model: --dry-run runs no model" in err
    _, err = half.run("--target-bpw", "4")
    assert "note: resuming after 3 of 8 parts\n" in err
    assert [r for r in half.runs() if r] == PARTS and half.kept.read_text() == measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "path_and_value",
    [(("text", "chunks"), 7), (("probe_errors", FREE[1]), 0.5), (("costs", 1, 0), "blk.*.ffn_gate.weight"), (("costs", 1, 1), FREE[:2]),
     (("costs", 1), ["blk.0", FREE[:3], 0.1])],
    ids=str,
)
def test_parts_that_were_measured_with_something_else_are_measured_again(half, measured, path_and_value):
    path, value = path_and_value
    half.kept.write_text(change(half.kept.read_text(), *path, value=value))
    half.log.unlink()
    _, err = half.run("--target-bpw", "4")
    assert "resuming after" not in err and [r for r in half.runs() if r] == PARTS and half.kept.read_text() == measured


def test_writing_takes_a_small_part_of_the_time(tmp_path, monkeypatch):
    """However long the list is: a write that takes a second is followed by some without."""
    now, written = [0.0], []

    def write(path):
        written.append(now[0])
        now[0] += 1.0

    keeper = results.RecordWriter(SimpleNamespace(write=write), tmp_path / "x.choice.json")
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    for _ in range(1000):
        keeper.write_if_due()
        now[0] += 0.5
    assert written[0] == 0 and 20 <= len(written) <= 30


def test_two_runs_that_keep_results_at_once(fresh, monkeypatch):
    """The second writes while the first does; what the last one kept is whole."""
    path, pid = fresh.kept, os.getpid()
    first, second = (results.ChoiceRecord({"by": n}) for n in (1, 2))
    open_file = results.open_file

    def open_and_be_overtaken(part):
        monkeypatch.setattr(results, "open_file", open_file)
        found = open_file(part)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        second.write(path)
        assert results.ChoiceRecord.read(path, {"by": 2}) == second
        monkeypatch.setattr(os, "getpid", lambda: pid)
        return found

    monkeypatch.setattr(results, "open_file", open_and_be_overtaken)
    first.write(path)
    assert json.loads(path.read_text())["made_from"] == {"by": 1}
    assert [*path.parent.iterdir()] == [path]
