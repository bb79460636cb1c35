"""Calibration by the quantizer: when it runs, what is cached and reused, full Hessians in passes, and failures.

A fake llama-imatrix runs, except in the last tests.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import gguf
import numpy as np
import pytest

from ggml_ext import WEIGHT_TYPES, export, inspect
from ggml_ext import quantize as program
from ggml_ext._allocation.target import DEFAULT_TYPES
from ggml_ext._base.files import fingerprint
from ggml_ext._base.locks import lock_directory
from ggml_ext._base.signals import SIGNALS, StopRequest, defer_signals, ignore_signals, stop_on_signals
from ggml_ext._base.units import GIB
from ggml_ext._calibration import calibration, cost
from ggml_ext._calibration.calibration import Record
from ggml_ext._calibration.cost import CalibrationCost
from ggml_ext._console.terminal import Terminal
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native import process as programs
from ggml_ext._native import token_sums
from helpers import calibration_folder
from helpers.calibration_folder import MATRICES
from helpers.commands import quantize, run_quantize, tool
from helpers.errors import check_error, files, fill_disk
from helpers.models import ROOT, write_gguf
from helpers.spies import Spy

workspace = calibration_folder.workspace  # the fixture


def test_calibration_runs_by_default_and_is_reused(workspace):
    out, err = workspace.run("--importance", "diagonal")
    (options,) = workspace.runs()
    assert {k: options[k] for k in ("-c", "--chunks", "-t", "-f")} == {"-c": "512", "--chunks": "100", "-t": "2", "-f": "calibration.txt"}
    assert options["-m"] == str(workspace.model) and "--moments" not in options and "--layers" not in options
    assert "note: calibration: diagonal Hessians of 8 inputs, 100 chunks" in err and "built-in text" in err and ": estimate 2 minutes" in err
    assert sorted(p.name for p in workspace.out.parent.iterdir()) == ["out.gguf", "small-f16.imatrix.gguf", "small-f16.imatrix.json"]
    assert f"importance  = diagonal, of {workspace.cache} (built-in text)" in out
    fields = workspace.fields()
    assert (fields["ggml_ext.importance"], fields["ggml_ext.calibration"]) == ("diagonal", "built-in")
    assert fields["quantize.imatrix.file"] == workspace.cache.name and fields["quantize.imatrix.dataset"] == "calibration.txt"
    assert (fields["quantize.imatrix.entries_count"], fields["quantize.imatrix.chunks_count"]) == (12, 100)
    # Another type reuses it and gives the bytes of --imatrix, except for the metadata.
    _, err = workspace.run("--importance", "diagonal", type_name="ccq2")
    assert f"reusing {workspace.cache}: same model and text" in err and len(workspace.runs()) == 1
    tensors = {t.name: t.data.tobytes() for t in gguf.GGUFReader(workspace.out).tensors}
    workspace.run("--imatrix", workspace.cache, type_name="ccq2")
    assert tensors == {t.name: t.data.tobytes() for t in gguf.GGUFReader(workspace.out).tensors}
    workspace.run("--importance", "none", type_name="ccq2")
    assert tensors != {t.name: t.data.tobytes() for t in gguf.GGUFReader(workspace.out).tensors} and len(workspace.runs()) == 1
    assert workspace.fields()["ggml_ext.importance"] == "none" and "quantize.imatrix.file" not in workspace.fields()


def test_equal_runs_in_different_directories_write_the_same_file(workspace):
    """The file names no directory."""
    written = []
    for name in ("first", "second"):
        (out := workspace.path / name / "out.gguf").parent.mkdir()
        workspace.out = out
        workspace.run("--importance", "diagonal", "--imatrix-from", workspace.text)
        written.append(out.read_bytes())
    assert written[0] == written[1] and len(workspace.runs()) == 2 and str(workspace.path).encode() not in written[0]


def test_chunks_are_limited_by_the_bytes_of_the_text(workspace):
    """The model has no vocabulary to count tokens with."""
    workspace.text.write_text("Some words in a row. " * 100)
    _, err = workspace.run("--imatrix-from", workspace.text)
    assert workspace.runs()[0]["--chunks"] == "4" and " 4 chunks of 512 tokens of some.txt" in err


def test_text_name_may_begin_with_a_dash(workspace, monkeypatch):
    """llama-imatrix would parse the name as an option; the record names no directory of the machine."""
    text = workspace.text.rename(workspace.path / "-text.txt")
    monkeypatch.chdir(workspace.path)
    for name in (text, text.name):
        _, err = workspace.run(f"--imatrix-from={name}")
        assert workspace.runs()[0]["-f"] == "./-text.txt"
        assert workspace.fields()["quantize.imatrix.dataset"] == workspace.fields()["ggml_ext.calibration"] == "-text.txt"


def test_progress_is_shown(workspace):
    _, err = workspace.run("--progress")
    assert "calibration: 100%" in err and "100/100" in err and "chunk/s" in err


@pytest.mark.slow
def test_other_text_model_or_chunks_calibrate_again(workspace, tmp_path):
    workspace.run()
    for i, flags in enumerate((["--imatrix-from", workspace.text], ["--calibration-chunks", "7"], []), 2):
        _, err = workspace.run(*flags)
        assert len(workspace.runs()) == i and "computing it again" in err, flags
    # The same size and name, but one weight differs.
    content = bytearray(workspace.model.read_bytes())
    content[-2] ^= 1
    (tmp_path / "other").mkdir()
    (other := tmp_path / "other" / workspace.model.name).write_bytes(content)
    _, err = workspace.run(source=other)
    assert len(workspace.runs()) == 5 and "computing it again" in err
    assert workspace.fields()["ggml_ext.calibration"] == "built-in"


@pytest.mark.slow
def test_cache_with_more_than_needed_is_reused(workspace, monkeypatch, lib):
    Spy(monkeypatch, lib)
    workspace.run("--importance", "block", type_name="itq3_t")
    assert workspace.runs()[0]["--moments"] == "block" and workspace.fields()["ggml_ext.importance"] == "block"
    workspace.run("--importance", "diagonal")
    assert len(workspace.runs()) == 1 and workspace.fields()["ggml_ext.importance"] == "diagonal"
    workspace.run("--importance", "full", type_name="itq3_t")
    assert [r["--moments"] for r in workspace.runs()] == ["block", "full"]
    workspace.run("--importance", "block", type_name="itq3_t")
    assert len(workspace.runs()) == 2 and workspace.fields()["ggml_ext.importance"] == "block"


def test_foreign_files_are_kept(workspace):
    workspace.cache.write_bytes(b"mine")
    workspace.error(str(workspace.cache), "is not from a calibration", "--imatrix")
    workspace.cache.unlink()
    workspace.run()
    workspace.cache.write_bytes(b"mine")  # instead of the described file
    workspace.error(str(workspace.cache), "--imatrix")
    assert len(workspace.runs()) == 1


def test_dry_run_shows_the_calibration(workspace):
    before = files(workspace.path)
    out, err = workspace.run("--dry-run", "--calibration-chunks", "12", type_name="itq3_t")
    assert "importance  = block, by a calibration: block-diagonal Hessians of 8 inputs, 12 chunks of 512 tokens of the built-in" in out
    assert "MiB of memory" in out and files(workspace.path) == before
    # Types that need importances are accepted: the calibration would provide them.
    workspace.run("--dry-run", "--tensor-type", "ffn_up=iq2_xxs", type_name="itq3_t")


def test_calibration_is_skipped_without_use(workspace, monkeypatch):
    _, err = workspace.run("--no-calibration")
    assert err.startswith("warning: --no-calibration: ") and "perplexity 33.8 without and 20.2 with it" in err and err.count("\n") == 1
    assert workspace.run("--importance", "none")[1] == ""
    monkeypatch.setattr(calibration, "find_tool", lambda name: None)
    _, err = workspace.run()
    assert err.startswith("warning: llama-imatrix is not in the package") and err.count("\n") == 1
    workspace.error("llama-imatrix is not in the package", flags=["--imatrix-from", workspace.text])
    workspace.error("llama-imatrix is not in the package", flags=["--importance", "diagonal"])
    assert not workspace.runs()


@pytest.mark.parametrize(("flags", "parts"), [
    (["--importance", "all"], ("--importance: got 'all'", "none, diagonal, block, full")),
    (["--calibration-chunks", "1"], ("--calibration-chunks: got 1", "at least 2")),
    (["--memory", "0"], ("--memory: got 0",)),
    (["--memory", "nan"], ("--memory: got nan",)),
    (["--imatrix", "a", "--imatrix-from", "b"], ("--imatrix and --imatrix-from",)),
    (["--no-calibration", "--imatrix-from", "b"], ("--no-calibration and --imatrix-from",)),
    (["--importance", "none", "--imatrix", "a"], ("--importance none", "a would not be used")),
    (["--imatrix-from", "missing"], ("cannot read missing", "No such file")),
])
def test_bad_options_are_refused(workspace, flags, parts):
    workspace.error(*parts, flags=flags)
    assert not workspace.runs()


@pytest.mark.parametrize("text", ["", " \n" * 3000, "hello " * 100])
def test_empty_and_tiny_texts_are_refused(workspace, text):
    workspace.text.write_text(text)
    workspace.error("some.txt has", "needs 1,024 tokens", flags=["--imatrix-from", workspace.text])
    assert not workspace.runs()


def test_failure_is_one_line(workspace, monkeypatch):
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail")
    workspace.error("exited with 3", str(workspace.model), "compute_imatrix: only 17 tokens;", "--no-calibration")
    monkeypatch.setenv("FAKE_IMATRIX_DO", "write nothing")
    workspace.error("wrote no file", "--no-calibration")
    monkeypatch.setenv("FAKE_IMATRIX_DO", "be killed")
    workspace.error(
        "llama-imatrix was killed for", "most likely because memory ran out: its limit was 3.0 GiB, pass a smaller --memory, ", flags=["--memory", "3"]
    )


def test_full_disk_is_noticed_first(workspace, monkeypatch):
    """There is room for OUT, about 20 kB, but not for the block-diagonal sums, 1.6 MB; then for neither."""
    for free, path in ((100_000, workspace.cache), (5, workspace.out)):
        fill_disk(monkeypatch, free)
        workspace.error("no space left on device", str(path))
    assert not workspace.runs()


@pytest.mark.slow
def test_interrupt_ends_llama_imatrix(workspace, tmp_path):
    driver = (
        "import signal, sys; from pathlib import Path; from ggml_ext import quantize; from ggml_ext._calibration import calibration\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore it
        f"calibration.find_tool = lambda name: Path({str(tmp_path / 'llama-imatrix')!r}); calibration.TEXT = Path({str(workspace.built_in)!r})\n"
        f"sys.exit(quantize.main({[str(workspace.model), str(workspace.out), '--type', 'ditto3']!r}))"
    )
    before = files(workspace.out.parent)
    process = subprocess.Popen([sys.executable, "-c", driver], stderr=subprocess.PIPE, text=True, env=os.environ | {"FAKE_IMATRIX_DO": "sleep"})
    while not workspace.runs():
        assert process.poll() is None
        time.sleep(0.05)
    child = workspace.runs()[0]["pid"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "error: interrupted" in err and "Traceback" not in err
    assert files(workspace.out.parent) == before
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_interrupt_during_the_start_ends_llama_imatrix(tmp_path, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(programs.subprocess, "Popen", Popen)
    for run in (programs.run_logged, lambda *args: programs.run_streamed(*args, print)):
        with pytest.raises(StopRequest) as stopped, stop_on_signals():
            run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
        process, code = started[-1], started[-1].poll()
        process.kill()
        assert code == -signal.SIGTERM and stopped.value.number == signal.SIGTERM


def run_in_thread(main, *args) -> int:
    """Run main() in a thread other than the main one and return its exit code."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main([*map(str, args)])))
    thread.start()
    thread.join(120)
    return codes[0]


@pytest.mark.slow
def test_calibration_runs_in_any_thread(workspace, tmp_path):
    """The bytes are the same and the signal handlers stay."""
    workspace.run()
    stock, in_thread = tmp_path / "stock.gguf", workspace.out.with_name("in_thread.gguf")
    handlers = [signal.getsignal(n) for n in SIGNALS]
    workspace.cache.unlink()
    assert run_in_thread(program.main, workspace.model, in_thread, "--type", "ditto3", "--threads", 2) == 0, workspace.capsys.readouterr().err
    assert len(workspace.runs()) == 2 and in_thread.read_bytes() == workspace.out.read_bytes()
    assert run_in_thread(export.main, in_thread, stock, "--type", "q8_0") == 0
    assert run_in_thread(inspect.main, stock, "--against", in_thread) == 0
    assert run_in_thread(program.main, workspace.model, stock, "--type", "ditto3") == 1  # the file exists
    err = workspace.capsys.readouterr().err
    assert "stock.gguf exists" in err and "unexpected" not in err
    assert handlers == [signal.getsignal(n) for n in SIGNALS]


def test_other_threads_leave_signals_alone(tmp_path):
    """Another thread inside these blocks neither receives a signal nor changes its handler."""
    signals = []
    before = signal.signal(signal.SIGTERM, lambda *_: signals.append("the caller's"))

    def enter_blocks() -> None:
        with stop_on_signals(), defer_signals():
            ignore_signals()
            signal.raise_signal(signal.SIGTERM)

    try:
        thread = threading.Thread(target=enter_blocks)
        thread.start()
        thread.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == ["the caller's"]


def test_concurrent_calibrations_run_once(workspace, monkeypatch):
    """The second run waits and reuses the result of the first."""
    first = contextlib.ExitStack()
    first.enter_context(lock_directory(workspace.out.parent))
    note = Terminal.note

    def until_waiting(self, text):
        note(self, text)
        if "another run calibrates in" in text:
            assert not workspace.runs()
            first.close()

    monkeypatch.setattr(Terminal, "note", until_waiting)
    _, err = workspace.run()
    assert "waiting for it" in err and len(workspace.runs()) == 1
    _, err = workspace.run()
    assert "waiting" not in err and len(workspace.runs()) == 1


# --- passes

LAYER_BYTES = {"full": 4 * (256 * 257 // 2 + 256 + 512 * 513 // 2 + 512), "block": 4 * (3 * (256 * 257 // 2) + 256 + 512)}


def memory_for(workspace, n_layers: float, kind: str = "full") -> str:
    """Return --memory for the model and a number of layers."""
    return repr((workspace.model.stat().st_size + n_layers * LAYER_BYTES[kind]) / GIB)


def read_data(path) -> dict[str, bytes]:
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "block"])
def test_hessians_are_collected_in_passes(workspace, monkeypatch, lib, kind):
    """Each pass has as many layers as fit; finished passes survive a failure; all layers get their Hessians."""
    spy = Spy(monkeypatch, lib)
    flags = ["--importance", kind, "--memory", memory_for(workspace, 2.5, kind)]
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail 2-3")
    _, err = workspace.run(*flags, code=1, type_name="itq3_t")
    assert "2 passes over layers" in err and "exited with 3" in err
    monkeypatch.delenv("FAKE_IMATRIX_DO")
    _, err = workspace.run("--importance", kind, "--memory", memory_for(workspace, 1.5, kind), code=0, type_name="itq3_t")
    assert "reusing 1 finished passes over layers" in err
    assert [r.get("--layers") for r in workspace.runs()] == ["0-1", "2-3", "2-2", "3-3"]
    assert len(spy.metrics) == len(MATRICES) and {whole for _, _, whole, _ in spy.metrics} == {kind == "full"}
    assert workspace.fields()["ggml_ext.importance"] == kind
    _, err = workspace.run(*flags, type_name="itq3_t")
    assert len(workspace.runs()) == 4 and "3 finished passes" in err
    before, one = read_data(workspace.out), workspace.cache.with_suffix(".layers-2-2.gguf")
    workspace.run("--importance", kind, "--imatrix", one, type_name="itq3_t")
    assert read_data(workspace.out) == before
    shutil.copy(one, one.with_name(one.name.replace("2-2", "1-2")))
    workspace.error("layers-0-1.gguf and ", "layers-1-2.gguf have the Hessians of the same layers", flags=["--imatrix", one, "--force"], type_name="itq3_t")


def test_foreign_file_in_place_of_a_pass_is_kept(workspace, lib):
    foreign = workspace.cache.with_suffix(".layers-0-1.gguf")
    foreign.write_bytes(b"mine")
    flags = ["--importance", "block", "--memory", memory_for(workspace, 2.5, "block")]
    workspace.error(str(foreign), "is not from a calibration", "--imatrix", flags=flags, type_name="itq3_t")
    assert foreign.read_bytes() == b"mine"


def test_missing_memory_for_full_hessians_is_refused(workspace):
    workspace.error("--importance full", "full Hessians of layer 0", "--memory", "--importance block, which needs",
                 flags=["--importance", "full", "--memory", memory_for(workspace, 0.5)], type_name="itq3_t")
    assert not workspace.runs()


def test_wide_inputs_get_block_diagonal_hessians(workspace, monkeypatch, lib):
    """A text that suffices for inputs of 256 columns and not for 512; a later run with more text, or without the limit, starts over."""
    Spy(monkeypatch, lib)
    monkeypatch.setattr(cost, "ENOUGH_TOKENS", 1 + 1024 // 512)
    monkeypatch.setattr(CalibrationCost, "collection_flops", lambda self, kind: 0.0)  # more than twice a model this small
    flags = ["--calibration-chunks", "2", "--imatrix-from", workspace.text]
    _, err = workspace.run(*flags, type_name="itq3_t")
    assert "block-diagonal Hessians of inputs of more than 256 columns: full Hessians of 512 columns need 1,536 tokens" in err
    (run,) = workspace.runs()
    assert (run["--moments"], run["--moments-columns"]) == ("full", "256")
    fields = workspace.fields()
    assert (fields["ggml_ext.importance"], fields["ggml_ext.importance.full_columns"]) == ("full", 256)
    out, _ = workspace.run(*flags, type_name="itq3_t")
    assert len(workspace.runs()) == 1 and "full up to 256 columns" in out
    workspace.run(*flags, "--importance", "block", type_name="itq3_t")
    assert len(workspace.runs()) == 1 and workspace.fields()["ggml_ext.importance"] == "block"
    workspace.run(*flags, "--importance", "full", type_name="itq3_t")
    assert len(workspace.runs()) == 2 and "--moments-columns" not in workspace.runs()[1]
    full = workspace.out.read_bytes()
    workspace.run(*flags, type_name="itq3_t")
    assert len(workspace.runs()) == 2 and workspace.fields()["ggml_ext.importance.full_columns"] == 256  # of the full ones, what the run asks for
    assert full != workspace.out.read_bytes()


def test_memory_depends_on_the_types_of_a_target(workspace, monkeypatch):
    """ggml-ext types have one Hessian each, upstream's scalar types share one; q8_0 uses none."""
    counts = []
    monkeypatch.setattr(calibration, "choose_importance", lambda *args: counts.append(args[3:]) or (0, "too wide"))
    for flags in (["--type", "itq3_t"], ["--target-bpw", "3"], ["--target-bpw", "3", "--target-types", "itq2_t,q4_k,ditto5"]):
        assert program.main([str(workspace.model), "--dry-run", "--threads", "2", "--no-propagate", *flags]) == 0
    assert counts == [(2, 0), (2, sum(name in WEIGHT_TYPES for name in DEFAULT_TYPES) + 1), (2, 3)]


def test_requested_full_hessians_may_exceed_memory(workspace, monkeypatch, lib):
    """A line reports it: the passes fit, the factorization does not."""
    Spy(monkeypatch, lib)
    monkeypatch.setattr(CalibrationCost, "factorization_bytes", lambda self, n_threads, n_compared_metrics: 7 * GIB)
    flags = ["--importance", "full", "--memory", "2"]
    _, err = workspace.run(*flags, type_name="itq3_t")
    assert "note: factorizing full Hessians needs 7.0 GiB, the limit is 2.0 GiB" in err and "--importance block" in err
    monkeypatch.undo()


def test_damaged_records_are_ignored(tmp_path):
    cache = tmp_path / "a.gguf"
    cache.write_bytes(b"data")
    record = Record({"x": 1}, "block", None, fingerprint(cache))
    wrong = [{"result": {}}, {"result": 3}, {"kind": "all"}, {"kind": 3}, {"kind": []}, {"layers": "a"}, {"layers": []},
             {"layers": ["0", "3"]}, {"layers": 3}, {"layers": [0, True]}, {"made_from": "x"}]
    contents = [json.dumps(record.__dict__ | values) for values in wrong]
    for content in (json.dumps(record.__dict__), "", "{}", "[1]", '{"kind": 3}', "[" * 100_000, *contents):
        calibration.record_path(cache).write_text(content)
        assert Record.read(cache) == (record if content == json.dumps(record.__dict__) else None)


# --- the real llama-imatrix

@pytest.mark.slow
def test_real_llama_imatrix_gives_its_own_diagonal(model, lib, tmp_path):
    flags = ["--imatrix-from", ROOT / "data" / "heldout.txt", "--calibration-chunks", "2", "--importance", "diagonal"]
    program_path = tool("llama-imatrix")
    quantize(model, tmp_path / "out.gguf", "--type", "ditto3", *flags)
    subprocess.run([program_path, "-m", model, "-f", ROOT / "data" / "heldout.txt", "-c", "512", "-b", "512", "--chunks", "2", "-t",
                    str(len(os.sched_getaffinity(0))), "-o", tmp_path / "theirs.gguf"], check=True, capture_output=True)
    cache = tmp_path / f"{model.name.removesuffix('.gguf')}.imatrix.gguf"
    tensors, theirs = ({t.name: t.data for t in gguf.GGUFReader(p).tensors} for p in (cache, tmp_path / "theirs.gguf"))
    assert set(tensors) == set(theirs) and tensors
    for name, data in tensors.items():
        np.testing.assert_array_equal(data, theirs[name])
    result = run_quantize(tmp_path / "out.gguf", tmp_path / "again.gguf", "--type", "itq3_t", "--allow-requantize", *flags[:2],
                          "--importance", "diagonal", "--calibration-chunks", "2")
    assert result.returncode == 0, result.stderr


def test_real_llama_imatrix_refuses_other_models(lib, tmp_path):
    tool("llama-imatrix")
    source = write_gguf(tmp_path / "in.gguf", MATRICES)
    before = files(tmp_path)
    flags = ["--imatrix-from", ROOT / "data" / "heldout.txt"]
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "ditto3", *flags, "-q")
    check_error(result, "calibration: llama-imatrix exited with 1", str(source), "the model does not load: ", "llama.context_length")
    assert files(tmp_path) == before


@pytest.mark.slow
def test_model_that_exceeds_the_memory_is_calibrated_by_layer(model, lib, tmp_path, monkeypatch):
    """All layers get their Hessians in one run; the weights differ from those of llama-imatrix's run by rounding to float32."""
    monkeypatch.setattr(token_sums, "bf16_library", lambda: None)
    flags = ["--type", "itq3_t", "--imatrix-from", ROOT / "data" / "heldout.txt", "--calibration-chunks", "2", "--effort", "fast"]
    for name, more in (("one", []), ("layers", ["--memory", CalibrationCost.read(GGUFFile(model)).n_bytes / 2 / GIB])):
        (tmp_path / name).mkdir()
        result = quantize(model, tmp_path / name / "out.gguf", *flags, "--importance", "full", *more)
        assert ("layer by layer" in result.stderr) == (name == "layers")
    assert sorted(p.name for p in (tmp_path / "layers").glob("*.gguf")) == ["model-f16.imatrix.gguf", "out.gguf"]
    one, layers = ({t.name: t.data for t in gguf.GGUFReader(tmp_path / name / "out.gguf").tensors} for name in ("one", "layers"))
    assert all(np.mean(one[name] != data) < 0.01 for name, data in layers.items())
    one = {name: data.tobytes() for name, data in one.items()}
    result = quantize(model, tmp_path / "one" / "blocks.gguf", *flags, "--importance", "block")
    assert "reusing" in result.stderr
    data = {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / "one" / "blocks.gguf").tensors}
    # Only the down projections have more than 256 columns; shrinkage differs too.
    assert data["blk.0.ffn_down.weight"] != one["blk.0.ffn_down.weight"]
