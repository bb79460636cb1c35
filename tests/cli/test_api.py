"""quantize_model(), evaluate_models(), export_model() and inspect_model(): the commands as functions, in any thread."""

import dataclasses
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import ggml_ext
from ggml_ext import export, inspect, quantize
from ggml_ext._base.option import check_keywords
from ggml_ext._base.signals import SIGNALS
from ggml_ext._commands.options import QuantizeOptions
from ggml_ext._evaluation.figures import PPL, Figure
from ggml_ext._report.quality import Evaluation, Quality
from helpers.models import ROOT, gaussian, write_gguf
from helpers.moments_files import correlated, write_moments

FLAGS = {"type": "ditto3", "importance": "none", "threads": 2}


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """Check that no call leaves the caller's signals ignored."""
    before = [signal.getsignal(n) for n in SIGNALS]
    yield
    assert [signal.getsignal(n) for n in SIGNALS] == before


@pytest.fixture
def source(tmp_path):
    tensors = {f"blk.{i}.{name}.weight": gaussian(24, 512, seed=i) for i in range(3) for name in ("ffn_up", "attn_v")}
    return write_gguf(tmp_path / "in.gguf", tensors)


def run_command(main, *args) -> int:
    return main([str(a) for a in args])


def test_functions_write_the_same_bytes_as_the_commands(lib, source, tmp_path, capfd):
    result = ggml_ext.quantize_model(source, tmp_path / "api.gguf", **FLAGS)
    streams = capfd.readouterr()
    assert streams.out == streams.err == ""
    assert run_command(quantize.main, source, tmp_path / "command.gguf", "--type", "ditto3", "--importance", "none") == 0
    assert (tmp_path / "api.gguf").read_bytes() == (tmp_path / "command.gguf").read_bytes()
    assert result.paths == (tmp_path / "api.gguf",) and result.type == "ditto3" and result.importance == "none"
    assert [t.type for t in result.tensors] == ["ditto3"] * 6 and result.weights == sum(24 * 512 for _ in result.tensors)
    assert all(0 < t.relative_squared_error < 0.1 and len(t.sha256) == 64 and t.shape == (512, 24) for t in result.tensors)
    assert result.bytes == sum(t.bytes for t in result.tensors) and result.bytes_before == 2 * result.weights
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.type = "q8_0"

    stock = ggml_ext.export_model(str(tmp_path / "api.gguf"), str(tmp_path / "stock.gguf"), type="q8_0")
    assert run_command(export.main, tmp_path / "api.gguf", tmp_path / "stock2.gguf", "--type", "q8_0", "-q") == 0
    assert (tmp_path / "stock.gguf").read_bytes() == (tmp_path / "stock2.gguf").read_bytes()
    assert {t.type for t in stock.tensors} == {"q8_0"} and stock.paths == (tmp_path / "stock.gguf",)

    findings = []
    inspection = ggml_ext.inspect_model(tmp_path / "api.gguf", source, on_finding=findings.append)
    assert [f.tensor.name for f in inspection.findings] == [f.tensor.name for f in findings] == [t.name for t in result.tensors]
    assert inspection.total.nmse == pytest.approx(result.relative_squared_error, rel=1e-6) and all(f.fits for f in inspection.findings)
    capfd.readouterr()
    assert run_command(inspect.main, tmp_path / "api.gguf", "--against", source, "--json") == 0
    assert f'"relative_squared_error": {inspection.record()["total"]["relative_squared_error"]!r}' in capfd.readouterr().out


def test_log_and_progress_are_called(lib, source, tmp_path):
    messages, steps = [], []
    result = ggml_ext.quantize_model(
        source, tmp_path / "out.gguf", type="itq3_t", no_calibration=True, log=lambda *words: messages.append(words),
        progress=lambda *step: steps.append(step),
    )
    assert ("warning", result.warnings[0]) in messages and "--no-calibration" in result.warnings[0]
    assert list(dict.fromkeys(phase for phase, _, _ in steps)) == ["checking", "itq3_t"]
    done = [n for phase, n, _ in steps if phase == "itq3_t"]
    assert done == sorted(done) and steps[-1][1] == steps[-1][2] == result.weights


def test_dry_run_writes_nothing(lib, source, tmp_path):
    before = set(tmp_path.iterdir())
    result = ggml_ext.quantize_model(source, dry_run=True, **FLAGS)
    assert result.paths == () and result.tensors[0].type == "ditto3" and result.tensors[0].sha256 is None and result.seconds == 0
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("keywords", "error", "part"), [
    ({"type": "itq9"}, ggml_ext.UserError, "--type"), ({}, ggml_ext.UserError, "--type"), ({"typ": "itq3_s"}, TypeError, "'typ'"),
    ({"type": "itq3_s", "threads": 0}, ggml_ext.UserError, "--threads"),
    ({"type": "itq3_s", "threads": "1"}, TypeError, "threads: got '1', must be an integer or None"),
    ({"type": "itq3_s", "threads": True}, TypeError, "threads: got True"), ({"type": "itq3_s", "force": "no"}, TypeError, "force: got 'no', must be True or False"),
    ({"type": "itq3_s", "memory": "4"}, TypeError, "memory: got '4', must be a number or None"), ({"type": None}, ggml_ext.UserError, "--type"),
    ({"type": ["itq3_s"]}, TypeError, "type: got ['itq3_s'], must be a text"), ({"type": "itq3_s", "imatrix": 3}, TypeError, "imatrix: got 3, must be a path"),
    ({"type": "itq3_s", "tensor_type": ["a=q8_0", 3.5, None]}, TypeError, "tensor_type: got None"),
    ({"type": "itq3_s", "progress": True}, TypeError, "progress: got True, must be a function"),
    ({"type": "itq3_s", "imatrix": "none.gguf"}, ggml_ext.UserError, "none.gguf"),
    ({"type": "itq3_s", "encoder": "fortran"}, ggml_ext.UserError, "--encoder"),
])
def test_bad_options_raise(source, tmp_path, keywords, error, part):
    before = set(tmp_path.iterdir())
    with pytest.raises(error, match=re.escape(part)):
        ggml_ext.quantize_model(source, tmp_path / "out.gguf", **keywords)
    assert set(tmp_path.iterdir()) == before


def test_single_values_and_numbers_are_accepted(lib, source, tmp_path):
    with pytest.raises(ggml_ext.UserError, match="no-such.gguf: No such file"):
        ggml_ext.evaluate_models(str(tmp_path / "no-such.gguf"))
    with pytest.raises(ggml_ext.UserError, match="MODEL is missing"):
        ggml_ext.evaluate_models([])
    one = ggml_ext.quantize_model(source, dry_run=True, tensor_type="attn_v=q8_0", **FLAGS)
    assert one.tensors == ggml_ext.quantize_model(source, dry_run=True, tensor_type=["attn_v=q8_0"], **FLAGS).tensors
    assert {t.type for t in one.tensors} == {"ditto3", "q8_0"}
    for bpw in (4.5, "4.5"):
        assert check_keywords(QuantizeOptions, {"input": source, "target_bpw": bpw}).types.target_bpw == "4.5"


def test_results_can_be_pickled_and_compared(lib, source, tmp_path):
    result = ggml_ext.quantize_model(source, tmp_path / "out.gguf", **FLAGS)
    moments = write_moments(tmp_path / "imatrix.gguf", {t.name: correlated(8, 512) for t in result.tensors})
    inspection = ggml_ext.inspect_model(tmp_path / "out.gguf", source, histograms=True, imatrix=moments)
    figures = Evaluation({"name": "built-in"}, 512, 2, None, [Quality(source, "in.gguf", 1, 16.0, {"f16": 1}, {PPL: Figure(2.0, 0.1)})], [])
    code = "import pickle, sys; [print(getattr(r, 'bytes', None) or r.record()) for r in pickle.load(sys.stdin.buffer)]"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps([result, inspection, figures]), capture_output=True)
    assert done.stdout.decode().splitlines() == [str(result.bytes), str(inspection.record()), str(figures.record())], done.stderr.decode()


def test_file_errors_raise(source, tmp_path):
    with pytest.raises(ggml_ext.UserError, match="no-such.gguf"):
        ggml_ext.inspect_model(tmp_path / "no-such.gguf")
    with pytest.raises(ggml_ext.UserError, match="no tensor in a ggml-ext type"):
        ggml_ext.export_model(source, tmp_path / "out.gguf", type="q8_0")


def test_calls_in_several_threads_are_independent(lib, source, tmp_path):
    """Each thread writes the bytes of a single run; no signal handler changes."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    types = ["ditto3", "itq3_s", "itq3_t", "ccq2"]
    alone = {name: ggml_ext.quantize_model(source, tmp_path / f"{name}.gguf", type=name, importance="none") for name in types}
    barrier = threading.Barrier(len(types))

    def run(name):
        barrier.wait()
        return ggml_ext.quantize_model(source, tmp_path / f"{name}-2.gguf", type=name, importance="none")

    with ThreadPoolExecutor(len(types)) as pool:
        result = dict(zip(types, pool.map(run, types), strict=True))
    for name in types:
        assert (tmp_path / f"{name}.gguf").read_bytes() == (tmp_path / f"{name}-2.gguf").read_bytes()
        assert [t.sha256 for t in result[name].tensors] == [t.sha256 for t in alone[name].tensors]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_next_call_resumes_after_a_callback_raised(lib, source, tmp_path):
    n_weights = 24 * 512

    def stop(phase, done, total):
        if phase != "checking" and done > 3 * n_weights:
            raise KeyboardInterrupt

    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        ggml_ext.quantize_model(source, folder / "out.gguf", progress=stop, **FLAGS)
    assert sorted(p.name for p in folder.iterdir()) == [".out.gguf.partial", ".out.gguf.partial.json"]
    messages = []
    ggml_ext.quantize_model(source, folder / "out.gguf", log=lambda kind, line: messages.append(line), **FLAGS)
    assert any("resuming after 3 of 6 tensors" in line for line in messages) and [p.name for p in folder.iterdir()] == ["out.gguf"]
    ggml_ext.quantize_model(source, tmp_path / "whole.gguf", **FLAGS)
    assert (folder / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()

    def fail(*_):
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        ggml_ext.quantize_model(source, folder / "other.gguf", progress=fail, **FLAGS)
    assert [p.name for p in folder.iterdir()] == ["out.gguf"]


def test_import_of_the_package_is_light():
    code = "import sys, ggml_ext; print([m for m in sys.modules if m.startswith('ggml_ext._encode') or 'api' in m.split('.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no_such"):
        ggml_ext.no_such  # noqa: B018


def test_code_of_the_python_page_runs(lib, source, tmp_path, monkeypatch, capsys):
    """Runs the blocks of docs/using/python.md in order on a small model of that name."""
    monkeypatch.chdir(tmp_path)
    source.rename(tmp_path / "model-f16.gguf")
    monkeypatch.setattr("ggml_ext._calibration.calibration.find_tool", lambda name: None)  # no program reads the model's graph
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "using" / "python.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    scope = {}
    for block in blocks:
        exec(block, scope)  # noqa: S102
    out = capsys.readouterr().out
    assert "blk.0.ffn_up.weight f16 -> itq3_t 0.0" in out and "itq2_t: 100%" in out and "exists: choose another name" in out
