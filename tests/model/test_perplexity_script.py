"""scripts/tools/perplexity.py on the reference model: its results, its baseline, its errors."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perplexity
import perplexity_run
from ggml_ext import WEIGHT_TYPES
from ggml_ext._base.console import Console
from ggml_ext._base.errors import UserError
from ggml_ext._evaluation.figures import parse_statistics
from ggml_ext._evaluation.logits import BaseLogits
from ggml_ext._evaluation.perplexity import PerplexityRunner
from helpers.commands import quantize
from helpers.models import MODEL, ROOT
from helpers.perplexity_record import BASELINE, N_CHUNKS, assert_recorded_perplexity, recorded_run
from helpers.type_kinds import TYPE_KINDS

UPSTREAM = {"q2_k": 2.625, "q3_k": 3.4375, "iq3_xxs": 3.0625}  # bits per weight
BY_DAY = [*TYPE_KINDS, *UPSTREAM]  # the encoders and kernels of all types have tests of their own
TEXT = ROOT / "data" / "heldout.txt"
LOG = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  12.625573 ±   0.398792
Mean ln(PPL(Q)/PPL(base))     :   0.042050 ±   0.003402
====== KL divergence statistics ======
Mean    KLD:   0.037054 ±   0.000514
 5.0%   KLD:   0.000850
====== Token probability statistics ======
Mean    Δp: -1.147 ± 0.063 %
"""
LAST_LINE = "Same top p: 89.711 ± 0.348 %\n"


def run_script(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "scripts" / "tools" / "perplexity.py", *map(str, args)], capture_output=True, text=True)


@pytest.fixture(scope="module", params=[pytest.param(BY_DAY, id="kinds"),
                                        pytest.param([n for n in WEIGHT_TYPES if n not in BY_DAY], id="others", marks=pytest.mark.nightly)])
def output_dir(request, model, lib, tmp_path_factory) -> Path:
    """Run the script on types that must agree with the baseline.

    One thread: two that wait for each other take five times as long on a busy CPU.
    """
    folder = tmp_path_factory.mktemp("perplexity")
    done = run_script("--model", model, "--types", ",".join(request.param), "--chunks", N_CHUNKS, "--threads", 1, "--out", folder, "--baseline", BASELINE)
    assert done.returncode == 0, done.stderr
    (folder / "table.md").write_text(done.stdout)
    return folder


@pytest.fixture
def results(output_dir) -> dict:
    return json.loads((output_dir / "perplexity.json").read_text())


def test_script_writes_results_and_table(output_dir, results):
    assert sorted(p.name for p in output_dir.iterdir()) == ["perplexity.json", "table.md"]
    for name, row in results["types"].items():
        assert row["weights"].keys() == {name}
        assert row["bpw"] == (WEIGHT_TYPES[name].bpw if name in WEIGHT_TYPES else UPSTREAM[name])
    table = (output_dir / "table.md").read_text().splitlines()[2:]
    titles = [name.upper() + (", with imatrix" if name == "iq3_xxs" else "") for name in results["types"]]
    assert [line.split(" | ")[0] for line in table] == ["| type", "| ---", "| F16", *(f"| {title}" for title in titles)]
    assert len({line.count("|") for line in table}) == 1


def test_perplexity_is_as_recorded(results):
    """The tolerance is smaller than that of the script's own comparison, a standard error."""
    for name, row in {"f16": results["base"], **results["types"]}.items():
        assert_recorded_perplexity(name, row["ppl"][0])


def run_with_results(results: dict, baseline: list | str, tmp_path: Path, monkeypatch, *args) -> str:
    """Run the script with given results and another baseline, and return its error line or ""."""
    monkeypatch.setattr(perplexity, "measure", lambda args, entries: results)
    path = tmp_path / "baseline.json"
    path.write_text(baseline if isinstance(baseline, str) else json.dumps(baseline))
    return script_error("--baseline", path, "--out", tmp_path / "out", *args)


def script_error(*args) -> str:
    """Run main() and return the error that run_script() prints, or ""."""
    try:
        perplexity.main([*map(str, args)])
    except (UserError, RuntimeError, OSError) as e:
        return f"error: {e}"
    return ""


@pytest.mark.parametrize("figure", perplexity.FIGURES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_difference_beyond_the_error_bar_fails(results, figure, sign, tmp_path, monkeypatch):
    """Tested in both directions; the message names the type and figure that differ."""
    run, name = recorded_run(), next(iter(results["types"]))
    value, error = results["types"][name][figure]
    run["types"][name][figure] = [value + 0.99 * sign * error, error]
    assert run_with_results(results, [run], tmp_path, monkeypatch) == ""
    run["types"][name][figure] = [value + 1.01 * sign * error, error]
    line = run_with_results(results, [run], tmp_path, monkeypatch)
    assert line.startswith(f"error: {name}: {figure} is {value:.6g}, recorded ") and "--update-baseline" in line and "\n" not in line


def test_different_base_fails(results, tmp_path, monkeypatch):
    run = recorded_run()
    run["base"]["ppl"] = [11.0, 0.3]
    assert "error: base: ppl is 12.1" in run_with_results(results, [run], tmp_path, monkeypatch)


def test_unrecorded_type_fails(results, tmp_path, monkeypatch):
    run, name = recorded_run(), next(iter(results["types"]))
    del run["types"][name]
    assert f"baseline.json: has no figures of {name}; record with --update-baseline" in run_with_results(results, [run], tmp_path, monkeypatch)


@pytest.mark.parametrize("key", ["model_sha256", "text_sha256", "ctx_size", "chunks", "imatrix"])
def test_baseline_of_another_run_fails(results, key, tmp_path, monkeypatch, capsys):
    """A baseline given by name must match; the default one is skipped."""
    run = recorded_run()
    run["run"][key] = "other"
    line = run_with_results(results, [run], tmp_path, monkeypatch)
    assert f"has no run of {results['run']}; record with --update-baseline" in line
    monkeypatch.setattr(perplexity, "BASELINE", tmp_path / "baseline.json")
    assert script_error("--out", tmp_path / "out") == "" and "not compared" in capsys.readouterr().err


def test_update_baseline_replaces_only_measured_types(results, tmp_path, monkeypatch):
    """The update adds a run if there is none."""
    changed, name = copy.deepcopy(results), next(iter(results["types"]))
    changed["types"] = {name: {**results["types"][name], "kld": [1.0, 0.1]}}
    other = {"run": {**results["run"], "chunks": 7}, "base": {"ppl": [1.0, 0.1]}, "types": {}}
    assert run_with_results(changed, [recorded_run(), other], tmp_path, monkeypatch, "--update-baseline") == ""
    path = tmp_path / "baseline.json"
    runs = json.loads(path.read_text())
    assert runs[0]["types"][name]["kld"] == [1.0, 0.1] and runs[0]["types"].keys() == recorded_run()["types"].keys()
    assert runs[1] == other
    path.unlink()
    assert script_error("--baseline", path, "--out", tmp_path / "out", "--update-baseline") == ""
    assert json.loads(path.read_text())[0]["run"] == results["run"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"run": {}}]'])
def test_damaged_baseline_is_refused(results, content, tmp_path, monkeypatch):
    if content == "{}":
        content = '{"run": 1}'
    assert "baseline.json: not a list of recorded runs" in run_with_results(results, content, tmp_path, monkeypatch)


@pytest.mark.parametrize(("args", "parts"), [
    (["--types", "itq3_s,q9_k"], ["--types: unknown type 'q9_k'", "itq3_s", "iq2_xxs"]),
    (["--types", "q3_k+matrix"], ["--types: unknown type 'q3_k+matrix'"]),
    (["--types", ""], ["--types: unknown type ''"]),
    (["--types", "q3_k,Q3_K"], ["--types names q3_k more than once"]),
    (["-m", "none.gguf"], ["--model none.gguf: no such file"]),
    (["-m", TEXT], ["heldout.txt", "not a GGUF file"]),
    (["-f", "none.txt"], ["--file none.txt: no such file"]),
    (["--baseline", "none.json"], ["--baseline none.json: no such file"]),
    (["--chunks", "0"], ["--chunks 0: needed at least 1 chunks of 256 tokens"]),
    (["--chunks", "3", "-c", "64"], ["--chunks 3: needed at least 4 chunks of 64 tokens"]),
    (["--ctx-size", "0"], ["--ctx-size 0: needed at least"]),
    (["--threads", "0"], ["--threads 0: needed at least 1"]),
    (["--chunks", "many"], ["--chunks", "invalid int value: 'many'"]),
])
def test_bad_input_is_refused(args, parts, tmp_path, model, lib):
    line = script_error("--model", model, "--out", tmp_path, *args)
    assert "\n" not in line
    for part in parts:
        assert part in line
    assert not any(tmp_path.iterdir())


def test_error_is_one_line_with_exit_code_1():
    done = run_script("--types", "q9_k")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


def test_short_text_is_refused(tmp_path, model, lib):
    (tmp_path / "short.txt").write_text("import os\n")
    line = script_error("-m", model, "-f", tmp_path / "short.txt", "--out", tmp_path / "out", "--types", "q3_k")
    assert "short.txt: has 10 bytes, needed at least 512 tokens" in line and "\n" not in line


def test_quantized_model_is_refused(tmp_path, model, lib):
    quantize(model, tmp_path / "q.gguf", "--type", "itq3_s")
    line = script_error("-m", tmp_path / "q.gguf", "--out", tmp_path / "out")
    assert "has block weights in itq3_s; needed F16, BF16 or F32" in line


def test_statistics_are_parsed():
    statistics = parse_statistics(LOG + LAST_LINE)
    assert statistics["Mean PPL(Q)"] == (12.625573, 0.398792) and statistics["Mean ln(PPL(Q)/PPL(base))"] == (0.04205, 0.003402)
    assert statistics["Mean KLD"] == (0.037054, 0.000514) and statistics["5.0% KLD"] == (0.00085, None)
    assert statistics["Mean Δp"] == (-1.147, 0.063) and statistics["Same top p"] == (89.711, 0.348)


@pytest.mark.parametrize(("log", "part"), [
    (LOG, "gave no statistics for"),
    (LOG + "E Unexpected negative standard deviation", "its output ends with"),
    ("0.0 E kl_divergence: inconsistent vocabulary (7 vs 9)\n" + LOG + LAST_LINE, "inconsistent vocabulary (7 vs 9)"),
    (LOG.replace("12.625573 ±   0.398792", "nan ± nan") + LAST_LINE, "Mean PPL(Q) is nan"),
])
def test_log_without_figures_is_refused(log, part, monkeypatch):
    """llama-perplexity exits with 0 in all these cases."""
    monkeypatch.setattr("ggml_ext._evaluation.perplexity.run_logged", lambda *args: (0, log))
    runner = PerplexityRunner(Path("llama-perplexity"), 256, 256, 1, (), Console(), lambda _: None)
    with pytest.raises(UserError) as e:
        runner.compare(MODEL, BaseLogits(Path("logits"), 256, 4096, 60))
    assert part in str(e.value)


def test_last_log_lines_are_complete(model, tmp_path):
    """Upstream does not flush its log thread at exit: on a busy CPU two of five short runs lost their result."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT.read_bytes()[:8000])
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        for _ in range(8):  # chance of no failure: 0.6^8 = 1.7 %
            perplexity_run.perplexity(model, text, n_ctx=128, n_chunks=2)
    finally:
        for process in loads:
            process.kill()
            process.wait()


def test_text_is_split_between_characters(tmp_path):
    """The parts join to the text, and what the baseline scores comes before the cut."""
    scored, rest = perplexity_run.split_text(TEXT, tmp_path)
    assert scored.read_bytes() + rest.read_bytes() == TEXT.read_bytes()
    assert scored.stat().st_size > 4 * rest.stat().st_size > 0
    (tmp_path / "odd.txt").write_bytes("é".encode() * 100 + b"\xff\r\n")
    scored, rest = perplexity_run.split_text(tmp_path / "odd.txt", tmp_path)
    assert scored.read_text("utf-8") == "é" * 85 and rest.read_bytes().endswith(b"\xff\r\n")


def test_incomplete_logits_are_refused(tmp_path):
    """The size of a complete file is computed, so that a file cut by a full disk is noticed."""
    path = tmp_path / "logits.bin"
    logits = BaseLogits(path, 128, 4096, 2)
    path.write_bytes(BaseLogits.HEADER.pack(b"_logits_", 128, 4096, 2).ljust(logits.n_bytes(), b"\0"))
    assert BaseLogits.read(path) == logits
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"must have {logits.n_bytes():,}"):
        BaseLogits.read(path)
    path.write_bytes(b"_logits_")
    with pytest.raises(UserError, match="holds no logits"):
        BaseLogits.read(path)
