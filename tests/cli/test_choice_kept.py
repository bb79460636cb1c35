"""Targets: measurements are cached for the next run, complete or partial, and foreign caches are ignored."""

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
from helpers.choosing import ALL_TYPES_MEASURED, FREE, LAYERS, SHAPES, bits_per_weight

fresh, measurements, workspace = choosing.fresh, choosing.measurements, choosing.workspace


def test_second_target_reuses_measurements(workspace, measurements):
    _, err = workspace.run("--target-kld", "0.05")
    assert not workspace.runs() and err.count("reusing cached") == 2 and workspace.cache.read_text() == measurements
    _, err = workspace.run("--target-bpw", "3", "--target-types", "itq2_t,q2_k,q4_k")
    assert not workspace.runs() and "measuring errors: 1 type," in err  # q2_k
    assert set(workspace.types().values()) <= {"itq2_t", "q2_k", "q4_k", "f32"} and bits_per_weight(workspace.out) <= 3
    assert len(json.loads(workspace.cache.read_text())["errors"][FREE[0]]) == len(json.loads(measurements)["errors"][FREE[0]]) + 1


@pytest.mark.parametrize("change", ["half", "a list", "another model", "another effort"])
def test_foreign_or_damaged_cache_is_ignored(workspace, measurements, change):
    contents = {"half": measurements[: len(measurements) // 2], "a list": "[]", "another model": measurements.replace('"sha256": "', '"sha256": "0')}
    content = contents.get(change, measurements)
    workspace.cache.write_text(content)
    _, err = workspace.run("--target-bpw", "4", "--dry-run", *(["--effort", "fast"] if change == "another effort" else []))
    assert "reusing cached" not in err and ALL_TYPES_MEASURED in err and workspace.cache.read_text() == content


def change(measurements: str, *path, value) -> str:
    """Return the cached results with another value at a path of keys and indices."""
    cache = json.loads(measurements)
    inside = cache
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return json.dumps(cache)


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
def test_cache_with_wrong_value_types_is_ignored(workspace, measurements, path, value):
    content = change(measurements, *path, value=value)
    workspace.cache.write_text(content)
    _, err = workspace.run("--target-bpw", "4", "--dry-run")
    assert "reusing cached" not in err and ALL_TYPES_MEASURED in err and workspace.cache.read_text() == content


def test_too_deeply_nested_cache_is_ignored(workspace):
    workspace.cache.write_text("[" * 100_000)
    assert ALL_TYPES_MEASURED in workspace.run("--target-bpw", "4", "--dry-run")[1]


def test_negative_costs_and_infinite_errors_are_reused(workspace, measurements):
    """Noise can make a cost negative; tensors of zeros that are stored otherwise have an infinite error."""
    content = change(change(measurements, "costs", 0, 2, value=-1e-5), "errors", FREE[1], "itq2_t", value=float("inf"))
    workspace.cache.write_text(content)
    assert workspace.run("--target-bpw", "4", "--dry-run")[1].count("reusing cached") == 2


def test_interrupt_keeps_measured_errors(fresh, monkeypatch):
    workspace, sample, done = fresh, ErrorMeasurement._measure_sample, []

    def stop(self, tensor, *others):
        if tensor.name == FREE[-1] and not done:
            done.append(tensor.name)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # until the main thread handles the signal
        return sample(self, tensor, *others)

    with monkeypatch.context() as patch:
        patch.setattr(ErrorMeasurement, "_measure_sample", stop)
        _, err = workspace.run("--target-bpw", "4", "--sensitivity", "usual", code=128 + signal.SIGTERM)
    assert "error: interrupted" in err
    cache = json.loads(workspace.cache.read_text())["errors"]
    assert cache and set(cache) < set(FREE) and {p.name for p in workspace.out.parent.iterdir()} == {workspace.cache.name}
    _, err = workspace.run("--target-bpw", "4", "--sensitivity", "usual")
    assert f"{len(FREE) - len(cache)} tensors, up to" in err


PARTS = [[n for n in FREE if name in n] for name in (*SHAPES, "token_embd")] + [[n for n in FREE if f"blk.{i}." in n] for i in range(LAYERS)]
# Kills a run as its 8th tensor or its 4th part begins. The first of them is in the file by then: a thread begins a tensor after the
# one two before it was handled.
KILL = """
import os, signal, sys
from pathlib import Path
from ggml_ext import quantize
from ggml_ext._allocation import error_measurement, sensitivity
from ggml_ext._allocation.error_measurement import ErrorMeasurement
tensors, parts = set(), []
sample, kld = ErrorMeasurement._measure_sample, sensitivity.Probe._measure_kld
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
ErrorMeasurement._measure_sample, sensitivity.Probe._measure_kld = sample_error, measure
sys.exit(quantize.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_repeated_kills_reach_the_same_result(fresh):
    """No part is measured twice."""
    workspace = fresh
    workspace.run("--target-bpw", "4", "--threads", "1")
    expected, cache, runs = workspace.out.read_bytes(), workspace.cache.read_text(), workspace.runs()
    for path in (workspace.out, workspace.cache, workspace.log):
        path.unlink()
    command = [sys.executable, "-c", KILL, workspace.path / "llama-perplexity", workspace.model, workspace.out, "--importance", "none"]
    command += ["--target-bpw", "4", "--threads", "1"]
    codes, before = [], ""
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(subprocess.run([*map(str, command)], capture_output=True, timeout=120).returncode)
        now = workspace.cache.read_text()
        assert now != before or codes[-1] == 0, "a run kept nothing"
        before = now
    assert codes[-1] == 0 and 4 <= len(codes) <= 12  # 13 tensors and 8 parts; on a slow machine one per run
    assert workspace.out.read_bytes() == expected and workspace.cache.read_text() == cache
    assert [r for r in workspace.runs() if r] == [r for r in runs if r] == PARTS


@pytest.fixture
def interrupted(fresh, monkeypatch):
    """Return a workspace after an interrupt behind three parts."""
    kld, count = sensitivity.Probe._measure_kld, []

    def stop(self, *args):
        count.append(args)
        if len(count) == 4:
            raise StopRequest(signal.SIGINT)
        return kld(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity.Probe, "_measure_kld", stop)
        fresh.run("--target-bpw", "4", code=128 + signal.SIGINT)
    assert fresh.runs() == [[], *PARTS[:3]] and {p.name for p in fresh.out.parent.iterdir()} == {fresh.cache.name}
    return fresh


def test_interrupt_keeps_measured_parts(interrupted, measurements):
    assert [name for name, *_ in json.loads(interrupted.cache.read_text())["costs"]] == [name for name, *_ in json.loads(measurements)["costs"]][:3]
    # Three parts are not complete.
    _, err = interrupted.run("--target-bpw", "4", "--dry-run")
    assert "using the sensitivities of another model: --dry-run runs no model" in err
    _, err = interrupted.run("--target-bpw", "4")
    assert "note: resuming after 3 of 8 parts\n" in err
    assert [r for r in interrupted.runs() if r] == PARTS and interrupted.cache.read_text() == measurements


@pytest.mark.slow
@pytest.mark.parametrize(
    "path_and_value",
    [(("text", "chunks"), 7), (("probe_errors", FREE[1]), 0.5), (("costs", 1, 0), "blk.*.ffn_gate.weight"), (("costs", 1, 1), FREE[:2]),
     (("costs", 1), ["blk.0", FREE[:3], 0.1])],
    ids=str,
)
def test_parts_of_other_inputs_are_measured_again(interrupted, measurements, path_and_value):
    path, value = path_and_value
    interrupted.cache.write_text(change(interrupted.cache.read_text(), *path, value=value))
    interrupted.log.unlink()
    _, err = interrupted.run("--target-bpw", "4")
    assert "resuming after" not in err and [r for r in interrupted.runs() if r] == PARTS and interrupted.cache.read_text() == measurements


def test_cache_is_written_rarely(tmp_path, monkeypatch):
    """After a write that takes a second, the next ones are skipped, for any length of the list."""
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


def test_concurrent_runs_leave_a_valid_cache(fresh, monkeypatch):
    """The second run writes during the first; the last cache is complete."""
    path, pid = fresh.cache, os.getpid()
    first, second = (results.ChoiceRecord({"by": n}) for n in (1, 2))
    open_file = results.open_file

    def open_after_the_other_run(part):
        monkeypatch.setattr(results, "open_file", open_file)
        stream = open_file(part)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        second.write(path)
        assert results.ChoiceRecord.read(path, {"by": 2}) == second
        monkeypatch.setattr(os, "getpid", lambda: pid)
        return stream

    monkeypatch.setattr(results, "open_file", open_after_the_other_run)
    first.write(path)
    assert json.loads(path.read_text())["made_from"] == {"by": 1}
    assert [*path.parent.iterdir()] == [path]
