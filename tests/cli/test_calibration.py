"""Calibration inside the quantizer: when it runs, what is kept and used again, whole matrices in passes, and bad luck.

A stand-in for llama-imatrix runs in its place, but in the tests that name the real one.
"""

import contextlib
import json
import os
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
from ggml_ext._base.files import fingerprint, lock_directory
from ggml_ext._base.signals import SIGNALS, StopRequest, defer_signals, ignore_signals, stop_on_signals
from ggml_ext._base.units import GIB
from ggml_ext._calibration import calibration
from ggml_ext._calibration.calibration import Record
from ggml_ext._calibration.cost import FACTORIZATION_RATE, Input, Model, choose_importance
from ggml_ext._console.terminal import Terminal
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native import process as programs
from helpers import calibration_folder
from helpers.calibration_folder import MATRICES
from helpers.commands import quantize, run_quantize, tool
from helpers.errors import check_error, files, fill_disk
from helpers.models import ROOT, gaussian, write_gguf
from helpers.spies import Spy

folder = calibration_folder.folder  # the fixture


def test_it_runs_by_itself_and_is_used_again(folder):
    out, err = folder.run("--importance", "diagonal")
    (options,) = folder.runs()
    assert {k: options[k] for k in ("-c", "--chunks", "-t", "-f")} == {"-c": "512", "--chunks": "100", "-t": "2", "-f": "calibration.txt"}
    assert options["-m"] == str(folder.model) and "--moments" not in options and "--layers" not in options
    assert "note: calibration: mean squares of 8 inputs, 100 chunks" in err and "built-in text" in err and "takes about 2 minutes" in err
    assert sorted(p.name for p in folder.out.parent.iterdir()) == ["out.gguf", "small-f16.imatrix.gguf", "small-f16.imatrix.json"]
    assert f"importance  = diagonal, of {folder.kept} (built-in text)" in out
    fields = folder.fields()
    assert (fields["ggml_ext.importance"], fields["ggml_ext.calibration"]) == ("diagonal", "built-in")
    assert fields["quantize.imatrix.file"] == folder.kept.name and fields["quantize.imatrix.dataset"] == "calibration.txt"
    assert (fields["quantize.imatrix.entries_count"], fields["quantize.imatrix.chunks_count"]) == (12, 100)
    # another type, with the same bytes as with the file by --imatrix, but for the metadata
    _, err = folder.run("--importance", "diagonal", type_name="ccq2")
    assert f"{folder.kept} is of this model and text: used again" in err and len(folder.runs()) == 1
    ours = {t.name: t.data.tobytes() for t in gguf.GGUFReader(folder.out).tensors}
    folder.run("--imatrix", folder.kept, type_name="ccq2")
    assert ours == {t.name: t.data.tobytes() for t in gguf.GGUFReader(folder.out).tensors}
    folder.run("--importance", "none", type_name="ccq2")
    assert ours != {t.name: t.data.tobytes() for t in gguf.GGUFReader(folder.out).tensors} and len(folder.runs()) == 1
    assert folder.fields()["ggml_ext.importance"] == "none" and "quantize.imatrix.file" not in folder.fields()


def test_equal_runs_in_different_folders_write_the_same_file(folder):
    """No name of a folder is in it."""
    written = []
    for name in ("first", "second"):
        (out := folder.path / name / "out.gguf").parent.mkdir()
        folder.out = out
        folder.run("--importance", "diagonal", "--imatrix-from", folder.text)
        written.append(out.read_bytes())
    assert written[0] == written[1] and len(folder.runs()) == 2 and str(folder.path).encode() not in written[0]


def test_a_text_has_no_more_chunks_than_bytes_for_them(folder):
    """Where the model has no vocabulary that could be asked."""
    folder.text.write_text("Some words in a row. " * 100)
    _, err = folder.run("--imatrix-from", folder.text)
    assert folder.runs()[0]["--chunks"] == "4" and " 4 chunks of 512 tokens of some.txt" in err


def test_a_text_whose_name_begins_with_a_dash(folder, monkeypatch):
    """llama-imatrix would take the name for an option; what it records names no folder of the machine."""
    text = folder.text.rename(folder.path / "-text.txt")
    monkeypatch.chdir(folder.path)
    for given in (text, text.name):
        _, err = folder.run(f"--imatrix-from={given}")
        assert folder.runs()[0]["-f"] == "./-text.txt"
        assert folder.fields()["quantize.imatrix.dataset"] == folder.fields()["ggml_ext.calibration"] == "-text.txt"


def test_progress(folder):
    _, err = folder.run("--progress")
    assert "calibration: 100%" in err and "100/100" in err and "chunk/s" in err


@pytest.mark.slow
def test_of_another_text_model_or_number_of_chunks(folder, tmp_path):
    folder.run()
    for i, flags in enumerate((["--imatrix-from", folder.text], ["--calibration-chunks", "7"], []), 2):
        _, err = folder.run(*flags)
        assert len(folder.runs()) == i and "made again" in err, flags
    # of the same size and name, one weight changed
    content = bytearray(folder.model.read_bytes())
    content[-2] ^= 1
    (tmp_path / "other").mkdir()
    (other := tmp_path / "other" / folder.model.name).write_bytes(content)
    _, err = folder.run(source=other)
    assert len(folder.runs()) == 5 and "made again" in err
    assert folder.fields()["ggml_ext.calibration"] == "built-in"


@pytest.mark.slow
def test_more_than_asked_for_serves(folder, monkeypatch, lib):
    Spy(monkeypatch, lib)
    folder.run("--importance", "block", type_name="itq3_t")
    assert folder.runs()[0]["--moments"] == "block" and folder.fields()["ggml_ext.importance"] == "block"
    folder.run("--importance", "diagonal")
    assert len(folder.runs()) == 1 and folder.fields()["ggml_ext.importance"] == "diagonal"
    folder.run("--importance", "full", type_name="itq3_t")
    assert [r["--moments"] for r in folder.runs()] == ["block", "full"]
    folder.run("--importance", "block", type_name="itq3_t")
    assert len(folder.runs()) == 2 and folder.fields()["ggml_ext.importance"] == "block"


def test_files_of_others_are_left_alone(folder):
    folder.kept.write_bytes(b"mine")
    folder.error(str(folder.kept), "was not made by a calibration", "--imatrix")
    folder.kept.unlink()
    folder.run()
    folder.kept.write_bytes(b"mine")  # in place of what the record describes
    folder.error(str(folder.kept), "--imatrix")
    assert len(folder.runs()) == 1


def test_a_dry_run_shows_what_would_run(folder):
    before = files(folder.path)
    out, err = folder.run("--dry-run", "--calibration-chunks", "12", type_name="itq3_t")
    assert "importance  = block, by a calibration: second moments of blocks of 8 inputs, 12 chunks of 512 tokens of the built-in" in out
    assert "MiB of memory" in out and files(folder.path) == before
    # types that need importances are no error: they would be there
    folder.run("--dry-run", "--tensor-type", "ffn_up=iq2_xxs", type_name="itq3_t")


def test_when_it_does_not_run(folder, monkeypatch):
    _, err = folder.run("--no-calibration")
    assert err.startswith("warning: --no-calibration: ") and "perplexity 33.8 without and 20.2 with it" in err and err.count("\n") == 1
    assert folder.run("--importance", "none")[1] == ""
    monkeypatch.setattr(calibration, "find_tool", lambda name: None)
    _, err = folder.run()
    assert err.startswith("warning: llama-imatrix is not in the package") and err.count("\n") == 1
    folder.error("llama-imatrix is not in the package", flags=["--imatrix-from", folder.text])
    folder.error("llama-imatrix is not in the package", flags=["--importance", "diagonal"])
    assert not folder.runs()


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
def test_bad_options(folder, flags, parts):
    folder.error(*parts, flags=flags)
    assert not folder.runs()


@pytest.mark.parametrize("text", ["", " \n" * 3000, "hello " * 100])
def test_empty_and_tiny_texts(folder, text):
    folder.text.write_text(text)
    folder.error("some.txt has", "1,024 tokens are needed", flags=["--imatrix-from", folder.text])
    assert not folder.runs()


def test_a_failure_is_one_line(folder, monkeypatch):
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail")
    folder.error("exited with 3", str(folder.model), "compute_imatrix: only 17 tokens;", "--no-calibration")
    monkeypatch.setenv("FAKE_IMATRIX_DO", "write nothing")
    folder.error("wrote no file", "--no-calibration")
    monkeypatch.setenv("FAKE_IMATRIX_DO", "be killed")
    folder.error(
        "llama-imatrix was killed for", "most likely because memory ran out: it was to use at most 3.0 GiB, pass a smaller --memory, ", flags=["--memory", "3"]
    )


def test_a_full_disk(folder, monkeypatch):
    """Room for OUT, which takes some 20 kB, but not for the moments of blocks, 1.6 MB; then not even for OUT."""
    for free, path in ((100_000, folder.kept), (5, folder.out)):
        fill_disk(monkeypatch, free)
        folder.error("no space left on device", str(path))
    assert not folder.runs()


@pytest.mark.slow
def test_an_interrupt_ends_the_program_too(folder, tmp_path):
    driver = (
        "import signal, sys; from pathlib import Path; from ggml_ext import quantize; from ggml_ext._calibration import calibration\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what a shell starts in the background ignores it
        f"calibration.find_tool = lambda name: Path({str(tmp_path / 'llama-imatrix')!r}); calibration.TEXT = Path({str(folder.built_in)!r})\n"
        f"sys.exit(quantize.main({[str(folder.model), str(folder.out), '--type', 'ditto3']!r}))"
    )
    before = files(folder.out.parent)
    process = subprocess.Popen([sys.executable, "-c", driver], stderr=subprocess.PIPE, text=True, env=os.environ | {"FAKE_IMATRIX_DO": "sleep"})
    while not folder.runs():
        assert process.poll() is None
        time.sleep(0.05)
    child = folder.runs()[0]["pid"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "error: interrupted" in err and "Traceback" not in err
    assert files(folder.out.parent) == before
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_an_interrupt_while_the_program_starts_ends_it(tmp_path, monkeypatch):
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


def in_a_thread(main, *args) -> int:
    """Exit code of main() in a thread that is not the main one."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main([*map(str, args)])))
    thread.start()
    thread.join(120)
    return codes[0]


@pytest.mark.slow
def test_the_programs_run_in_any_thread(folder, tmp_path):
    """With a calibration, which starts a program: the same bytes, and signals stay as they are."""
    folder.run()
    stock, in_thread = tmp_path / "stock.gguf", folder.out.with_name("in_thread.gguf")
    handlers = [signal.getsignal(n) for n in SIGNALS]
    folder.kept.unlink()
    assert in_a_thread(program.main, folder.model, in_thread, "--type", "ditto3", "--threads", 2) == 0, folder.capsys.readouterr().err
    assert len(folder.runs()) == 2 and in_thread.read_bytes() == folder.out.read_bytes()
    assert in_a_thread(export.main, in_thread, stock, "--type", "q8_0") == 0
    assert in_a_thread(inspect.main, stock, "--against", in_thread) == 0
    assert in_a_thread(program.main, folder.model, stock, "--type", "ditto3") == 1  # it exists
    err = folder.capsys.readouterr().err
    assert "stock.gguf exists" in err and "unexpected" not in err
    assert handlers == [signal.getsignal(n) for n in SIGNALS]


def test_signals_are_the_main_threads_affair(tmp_path):
    """What another thread does within these neither takes a signal nor changes what becomes of it."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("the caller's"))

    def work() -> None:
        with stop_on_signals(), defer_signals():
            ignore_signals()
            signal.raise_signal(signal.SIGTERM)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == ["the caller's"]


def test_two_calibrations_in_one_folder(folder, monkeypatch):
    """The second waits, and uses what the first one made."""
    first = contextlib.ExitStack()
    first.enter_context(lock_directory(folder.out.parent))
    note = Terminal.note

    def until_waiting(self, text):
        note(self, text)
        if "another run calibrates in" in text:
            assert not folder.runs()
            first.close()

    monkeypatch.setattr(Terminal, "note", until_waiting)
    _, err = folder.run()
    assert "waiting for its end" in err and len(folder.runs()) == 1
    _, err = folder.run()
    assert "waiting" not in err and len(folder.runs()) == 1


# --- whole matrices

LAYER_BYTES = 4 * (256 * 257 // 2 + 256 + 512 * 513 // 2 + 512)


def memory_for(folder, n_layers: float) -> str:
    """--memory that the model and so many layers fit into."""
    return repr((folder.model.stat().st_size + n_layers * LAYER_BYTES) / GIB)


@pytest.mark.slow
def test_passes_over_layers(folder, monkeypatch, lib):
    """Each as long as fits; finished ones are kept over a failure and used again; all layers get whole matrices."""
    spy = Spy(monkeypatch, lib)
    flags = ["--importance", "full", "--memory", memory_for(folder, 2.5)]
    monkeypatch.setenv("FAKE_IMATRIX_DO", "fail 2-3")
    _, err = folder.run(*flags, code=1, type_name="itq3_t")
    assert "2 passes over layers" in err and "exited with 3" in err
    monkeypatch.delenv("FAKE_IMATRIX_DO")
    _, err = folder.run("--importance", "full", "--memory", memory_for(folder, 1.5), code=0, type_name="itq3_t")
    assert "1 finished passes over layers are used again" in err
    assert [r.get("--layers") for r in folder.runs()] == ["0-1", "2-3", "2-2", "3-3"]
    assert len(spy.metrics) == len(MATRICES) and all(whole for _, _, whole, _ in spy.metrics)
    assert folder.fields()["ggml_ext.importance"] == "full"
    _, err = folder.run(*flags, type_name="itq3_t")
    assert len(folder.runs()) == 4 and "3 finished passes" in err


def test_no_memory_for_whole_matrices(folder):
    folder.error("--importance full", "whole matrices of layer 0", "--memory", "--importance block, which takes",
                 flags=["--importance", "full", "--memory", memory_for(folder, 0.5)], type_name="itq3_t")
    assert not folder.runs()


def model(width: int, n_layers: int = 4, n_weights: float = 1e9, **replaced) -> Model:
    inputs = tuple(Input(i, width, 1, 1) for i in range(n_layers))
    return Model(**{"n_bytes": GIB, "inputs": inputs, "n_weights_used": int(n_weights), "factorization": n_layers * width**3 / 3} | replaced)


@pytest.mark.parametrize(("given", "n_tokens", "memory", "kind", "why"), [
    (model(4096), 51200, 10 * GIB, "full", ""),
    (model(4096), 51200, 1.1 * GIB, "block", "need 1.1 GiB at once, 1.1 are there"),  # 4 triangles of 32 MiB beside 1 GiB
    (model(4096), 7 * 4096 - 1, 10 * GIB, "block", "of 4,096 columns need 28,672 tokens"),
    (model(4096, n_weights=1e7), 51200, 10 * GIB, "block", "more than double the time"),
])
@pytest.mark.parametrize("n_threads", [1, 2, 64])
def test_choice_of_importance(given, n_tokens, memory, kind, why, n_threads):
    found = choose_importance(given, n_tokens, memory, n_threads, 0)
    assert found[0] == kind and why in found[1]


@pytest.mark.parametrize("n_threads", [1, 2, 64])
@pytest.mark.parametrize(("n_types", "times"), [(0, 1), (5, 7)], ids=["OUT", "five types, the sensitivities and OUT"])
def test_all_threads_factorize_within_15_minutes(n_threads, n_types, times):
    most = 900 * FACTORIZATION_RATE * n_threads / times
    assert choose_importance(model(4096, factorization=0.98 * most), 51200, 100 * GIB, n_threads, n_types) == ("full", "")
    kind, why = choose_importance(model(4096, factorization=1.02 * most), 51200, 100 * GIB, n_threads, n_types)
    assert kind == "block" and "take 15 minutes to factorize" in why


@pytest.mark.parametrize(("given", "memory", "n_threads", "kind", "why"), [
    # 256 MiB for each thread, where model and moments take 1.1 GiB
    (model(4096), 1.9 * GIB, 7, "full", ""),
    (model(4096), 1.9 * GIB, 8, "block", "need 2.0 GiB at once, 1.9 are there"),
])
def test_choice_of_importance_for_a_target(given, memory, n_threads, kind, why):
    """Errors of five types are measured, by each thread on a tensor of its own."""
    found = choose_importance(given, 51200, memory, n_threads, 5)
    assert found[0] == kind and why in found[1]


def test_the_types_of_a_target_count(folder, monkeypatch):
    """Those of ours, which have metrics, and the scalar ones of llama.cpp, which share one; q8_0 takes none."""
    found = []
    monkeypatch.setattr(calibration, "choose_importance", lambda *args: found.append(args[3:]) or ("block", ""))
    for flags in (["--type", "itq3_t"], ["--target-bpw", "3"], ["--target-bpw", "3", "--target-types", "itq2_t,q4_k,ditto5"]):
        assert program.main([str(folder.model), "--dry-run", "--threads", "2", *flags]) == 0
    assert found == [(2, 0), (2, sum(name in WEIGHT_TYPES for name in DEFAULT_TYPES) + 1), (2, 3)]


def test_whole_matrices_that_are_asked_for_may_take_more_memory(folder, monkeypatch, lib):
    """A line says so: the moments fit in passes, factorizing does not."""
    Spy(monkeypatch, lib)
    monkeypatch.setattr(Model, "factorization_bytes", lambda self, n_threads, n_types: 7 * GIB)
    flags = ["--importance", "full", "--memory", "2"]
    _, err = folder.run(*flags, type_name="itq3_t")
    assert "note: factorizing whole matrices takes 7.0 GiB, 2.0 GiB may be used" in err and "--importance block" in err
    monkeypatch.undo()


def test_what_a_model_costs(tmp_path):
    """Inputs that matrices share are counted once; of experts each has its own."""
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": gaussian(8, 256), "blk.0.attn_k.weight": gaussian(8, 256),
                                            "blk.0.ffn_down_exps.weight": gaussian(4, 8, 320), "blk.0.attn_norm.weight": gaussian(256),
                                            "token_embd.weight": gaussian(8, 256)},
                      fill=lambda w: (w.add_expert_count(4), w.add_expert_used_count(2)))
    found = Model.read(GGUFFile(path))
    assert found.inputs == (Input(0, 256, 1, 1), Input(0, 320, 4, 2)) and found.n_weights_used == 3 * 8 * 256 + 2 * 8 * 320  # the embeddings are the output matrix too
    small = 256 * 257 // 2
    assert found.moments_bytes("block") == 4 * (small + 256 + 4 * (small + 64 * 65 // 2 + 320))
    assert found.moments_bytes("full") == 4 * (small + 256 + 4 * (320 * 321 // 2 + 320))
    assert found.moments_bytes("diagonal") == 4 * (256 + 4 * 320)


def test_records_are_read_with_care(tmp_path):
    kept = tmp_path / "a.gguf"
    kept.write_bytes(b"data")
    record = Record({"x": 1}, "block", None, fingerprint(kept))
    wrong = [{"result": {}}, {"result": 3}, {"kind": "all"}, {"kind": 3}, {"kind": []}, {"layers": "a"}, {"layers": []},
             {"layers": ["0", "3"]}, {"layers": 3}, {"layers": [0, True]}, {"made_from": "x"}]
    contents = [json.dumps(record.__dict__ | values) for values in wrong]
    for content in (json.dumps(record.__dict__), "", "{}", "[1]", '{"kind": 3}', "[" * 100_000, *contents):
        calibration.record_path(kept).write_text(content)
        assert Record.read(kept) == (record if content == json.dumps(record.__dict__) else None)


# --- the real program

@pytest.mark.slow
def test_with_the_real_program(model, lib, tmp_path):
    """The diagonal equals what llama-imatrix makes by itself."""
    flags = ["--imatrix-from", ROOT / "data" / "heldout.txt", "--calibration-chunks", "2", "--importance", "diagonal"]
    program_path = tool("llama-imatrix")
    quantize(model, tmp_path / "out.gguf", "--type", "ditto3", *flags)
    subprocess.run([program_path, "-m", model, "-f", ROOT / "data" / "heldout.txt", "-c", "512", "-b", "512", "--chunks", "2", "-t",
                    str(len(os.sched_getaffinity(0))), "-o", tmp_path / "theirs.gguf"], check=True, capture_output=True)
    kept = tmp_path / f"{model.name.removesuffix('.gguf')}.imatrix.gguf"
    ours, theirs = ({t.name: t.data for t in gguf.GGUFReader(p).tensors} for p in (kept, tmp_path / "theirs.gguf"))
    assert set(ours) == set(theirs) and ours
    for name, data in ours.items():
        np.testing.assert_array_equal(data, theirs[name])
    result = run_quantize(tmp_path / "out.gguf", tmp_path / "again.gguf", "--type", "itq3_t", "--allow-requantize", *flags[:2],
                          "--importance", "diagonal", "--calibration-chunks", "2")
    assert result.returncode == 0, result.stderr


def test_the_real_program_refuses_what_is_no_language_model(lib, tmp_path):
    tool("llama-imatrix")
    source = write_gguf(tmp_path / "in.gguf", MATRICES)
    before = files(tmp_path)
    flags = ["--imatrix-from", ROOT / "data" / "heldout.txt"]
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "ditto3", *flags, "-q")
    check_error(result, "calibration: llama-imatrix exited with 1", str(source), "--no-calibration")
    assert files(tmp_path) == before


@pytest.mark.slow
def test_whole_matrices_of_the_real_program_in_passes(model, lib, tmp_path):
    """By passes over layers the same bytes as in one; a kept file of one pass serves blocks."""
    if "--layers" not in subprocess.run([tool("llama-imatrix"), "--help"], capture_output=True, text=True).stdout:
        pytest.skip("llama-imatrix collects no second moments")
    flags = ["--type", "itq3_t", "--imatrix-from", ROOT / "data" / "heldout.txt", "--calibration-chunks", "2", "--effort", "fast"]
    cost = Model.read(GGUFFile(model))
    memory = (cost.n_bytes + 4.5 * cost.moments_bytes("full", cost.layers[:1])) / GIB
    for name, more in (("one", []), ("passes", ["--memory", memory])):
        (tmp_path / name).mkdir()
        quantize(model, tmp_path / name / "out.gguf", *flags, "--importance", "full", *more)
    assert sorted(p.name for p in (tmp_path / "passes").glob("*.gguf")) == [
        "model-f16.imatrix.layers-0-3.gguf", "model-f16.imatrix.layers-4-7.gguf", "out.gguf"]
    one, passes = ({t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / name / "out.gguf").tensors} for name in ("one", "passes"))
    assert one == passes
    result = quantize(model, tmp_path / "one" / "blocks.gguf", *flags, "--importance", "block")
    assert "used again" in result.stderr
    data = {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / "one" / "blocks.gguf").tensors}
    # the down projections alone have more than 256 columns; damping differs too
    assert data["blk.0.ffn_down.weight"] != one["blk.0.ffn_down.weight"]
