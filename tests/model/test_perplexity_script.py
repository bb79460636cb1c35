"""scripts/tools/perplexity.py on the reference model, against its baseline; and that it fails where it has to."""

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
from ggml_ext._base.errors import UserError
from helpers.commands import quantize
from helpers.models import MODEL, ROOT
from helpers.perplexity_record import BASELINE, N_CHUNKS, assert_recorded_perplexity, recorded_run

STOCK = ["q2_k", "q3_k", "iq3_xxs"]
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


def script(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "scripts" / "tools" / "perplexity.py", *map(str, args)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def logits_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logits")


@pytest.fixture(scope="module")
def out(model, lib, logits_dir, tmp_path_factory) -> Path:
    """The script's results for our types and some stock ones, which agree with the baseline.

    One thread: two that wait for each other take five times as long where other processes use the processors too.
    """
    folder = tmp_path_factory.mktemp("perplexity")
    done = script("--model", model, "--types", ",".join([*WEIGHT_TYPES, *STOCK]), "--chunks", N_CHUNKS, "--threads", 1,
                  "--logits-dir", logits_dir, "--out", folder, "--baseline", BASELINE)
    assert done.returncode == 0, done.stderr
    (folder / "table.md").write_text(done.stdout)
    return folder


@pytest.fixture
def results(out) -> dict:
    return json.loads((out / "perplexity.json").read_text())


def test_results_and_table(out, results):
    assert sorted(p.name for p in out.iterdir()) == ["perplexity.json", "table.md"]
    assert list(results["types"]) == [*WEIGHT_TYPES, *STOCK]
    for name, row in results["types"].items():
        assert row["weights"].keys() == {name}
        assert row["bpw"] == (WEIGHT_TYPES[name].bpw if name in WEIGHT_TYPES else {"q2_k": 2.625, "q3_k": 3.4375, "iq3_xxs": 3.0625}[name])
    table = (out / "table.md").read_text().splitlines()[2:]
    assert [line.split(" | ")[0] for line in table] == [
        "| type", "| ---", "| F16", *(f"| {t.upper()}" for t in WEIGHT_TYPES), "| Q2_K", "| Q3_K", "| IQ3_XXS, with imatrix"]
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("name", ["f16", *WEIGHT_TYPES, *STOCK])
def test_perplexity_is_as_recorded(results, name):
    """Closer than the script's own comparison, which allows a standard error."""
    assert_recorded_perplexity(name, (results["base"] if name == "f16" else results["types"][name])["ppl"][0])


def test_quantized_file_and_saved_logits(results, model, logits_dir, tmp_path):
    """A file has the figures of its type; the logits of the first run serve again."""
    path = tmp_path / "mine.gguf"
    quantize(model, path, "--type", "itq3_s", *perplexity_run.UNIFORM)
    before = [(p.name, p.stat().st_mtime_ns) for p in logits_dir.iterdir()]
    done = script("-m", model, "--types", path, "--chunks", N_CHUNKS, "-t", 1, "--logits-dir", logits_dir, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "used again" in done.stderr and before == [(p.name, p.stat().st_mtime_ns) for p in logits_dir.iterdir()]
    found = json.loads((tmp_path / "out" / "perplexity.json").read_text())["types"]["mine"]
    assert {f: found[f] for f in perplexity.FIGURES} == {f: results["types"]["itq3_s"][f] for f in perplexity.FIGURES}


def run_on(results: dict, baseline: list | str, tmp_path: Path, monkeypatch, *args) -> str:
    """The script with the figures measured before and another baseline; returns its error line, "" for none."""
    monkeypatch.setattr(perplexity, "measure", lambda args, entries: results)
    path = tmp_path / "baseline.json"
    path.write_text(baseline if isinstance(baseline, str) else json.dumps(baseline))
    return error_of("--baseline", path, "--out", tmp_path / "out", *args)


def error_of(*args) -> str:
    """What run_script() prints on stderr before the script exits with 1. "" if it succeeds."""
    try:
        perplexity.main([*map(str, args)])
    except (UserError, RuntimeError, OSError) as e:
        return f"error: {e}"
    return ""


@pytest.mark.parametrize("figure", perplexity.FIGURES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_fails_beyond_the_error_bar(results, figure, sign, tmp_path, monkeypatch):
    """In both directions, and for the type and figure alone that differ."""
    run = recorded_run()
    value, error = results["types"]["itq3_s"][figure]
    run["types"]["itq3_s"][figure] = [value + 0.99 * sign * error, error]
    assert run_on(results, [run], tmp_path, monkeypatch) == ""
    run["types"]["itq3_s"][figure] = [value + 1.01 * sign * error, error]
    line = run_on(results, [run], tmp_path, monkeypatch)
    assert line.startswith(f"error: itq3_s: {figure} is {value:.6g}, recorded ") and "--update-baseline" in line and "\n" not in line


def test_fails_for_another_base(results, tmp_path, monkeypatch):
    run = recorded_run()
    run["base"]["ppl"] = [11.0, 0.3]
    assert "error: base: ppl is 12.1" in run_on(results, [run], tmp_path, monkeypatch)


def test_fails_for_an_unrecorded_type(results, tmp_path, monkeypatch):
    run = recorded_run()
    del run["types"]["itq3_s"]
    assert "baseline.json: has no figures of itq3_s; record with --update-baseline" in run_on(results, [run], tmp_path, monkeypatch)


@pytest.mark.parametrize("key", ["model_sha256", "text_sha256", "ctx_size", "chunks", "imatrix"])
def test_baseline_of_something_else(results, key, tmp_path, monkeypatch, capsys):
    """Named, it has to fit; by default it is left out."""
    run = recorded_run()
    run["run"][key] = "other"
    line = run_on(results, [run], tmp_path, monkeypatch)
    assert f"has no such run: {key} is {results['run'][key]}, recorded other; record with --update-baseline" in line
    monkeypatch.setattr(perplexity, "BASELINE", tmp_path / "baseline.json")
    assert error_of("--out", tmp_path / "out") == "" and "not compared" in capsys.readouterr().err


def test_update_baseline(results, tmp_path, monkeypatch):
    """Adds a run or replaces what was measured; other types and runs stay."""
    changed = copy.deepcopy(results)
    changed["types"] = {"itq3_s": {**results["types"]["itq3_s"], "kld": [1.0, 0.1]}}
    other = {"run": {**results["run"], "chunks": 7}, "base": {"ppl": [1.0, 0.1]}, "types": {}}
    assert run_on(changed, [recorded_run(), other], tmp_path, monkeypatch, "--update-baseline") == ""
    path = tmp_path / "baseline.json"
    found = json.loads(path.read_text())
    assert found[0]["types"]["itq3_s"]["kld"] == [1.0, 0.1] and found[0]["types"].keys() == recorded_run()["types"].keys()
    assert found[1] == other
    path.unlink()
    assert error_of("--baseline", path, "--out", tmp_path / "out", "--update-baseline") == ""
    assert json.loads(path.read_text())[0]["run"] == results["run"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"run": {}}]'])
def test_damaged_baseline(results, content, tmp_path, monkeypatch):
    if content == "{}":
        content = '{"run": 1}'
    assert "baseline.json: not a list of recorded runs" in run_on(results, content, tmp_path, monkeypatch)


@pytest.mark.parametrize(("args", "parts"), [
    (["--types", "itq3_s,q9_k"], ["--types: unknown type 'q9_k'", "itq3_s", "iq2_xxs", "FILE.gguf"]),
    (["--types", "q3_k+matrix"], ["--types: unknown type 'q3_k+matrix'"]),
    (["--types", ""], ["--types: unknown type ''"]),
    (["--types", "q3_k,Q3_K"], ["--types names q3_k more than once"]),
    (["--types", "none.gguf"], ["--types none.gguf: no such file"]),
    (["-m", "none.gguf"], ["--model none.gguf: no such file"]),
    (["-m", TEXT], ["heldout.txt", "not a GGUF file"]),
    (["-f", "none.txt"], ["--file none.txt: no such file"]),
    (["--imatrix", "none.gguf"], ["--imatrix none.gguf: no such file"]),
    (["--baseline", "none.json"], ["--baseline none.json: no such file"]),
    (["--chunks", "0"], ["--chunks 0: needed at least 1 chunks of 256 tokens"]),
    (["--chunks", "3", "-c", "64"], ["--chunks 3: needed at least 4 chunks of 64 tokens"]),
    (["--ctx-size", "0"], ["--ctx-size 0: needed at least"]),
    (["--threads", "0"], ["--threads 0: needed at least 1"]),
    (["--chunks", "many"], ["--chunks", "invalid int value: 'many'"]),
    (["--imatrix", TEXT, "--types", "iq3_xxs", "--chunks", "1", "-t", "1"], ["llama-quantize exited with"]),
])
def test_bad_input(args, parts, tmp_path, model, lib):
    line = error_of("--model", model, "--out", tmp_path, *args)
    assert "\n" not in line
    for part in parts:
        assert part in line
    assert not any(tmp_path.iterdir())


def test_exit_code_and_one_line():
    done = script("--types", "q9_k")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


def test_short_text(tmp_path, model, lib):
    (tmp_path / "short.txt").write_text("import os\n")
    line = error_of("-m", model, "-f", tmp_path / "short.txt", "--out", tmp_path / "out", "--types", "q3_k")
    assert "short.txt: has 10 bytes, needed at least 512 tokens" in line and "\n" not in line


def test_quantized_model(tmp_path, model, lib):
    quantize(model, tmp_path / "q.gguf", "--type", "itq3_s")
    line = error_of("-m", tmp_path / "q.gguf", "--out", tmp_path / "out")
    assert "has matrices in itq3_s; needed F16, BF16 or F32" in line


def test_statistics_of_a_log():
    found = perplexity_run.parse_statistics(LOG + LAST_LINE)
    assert found["Mean PPL(Q)"] == (12.625573, 0.398792) and found["Mean ln(PPL(Q)/PPL(base))"] == (0.04205, 0.003402)
    assert found["Mean KLD"] == (0.037054, 0.000514) and found["5.0% KLD"] == (0.00085, None)
    assert found["Mean Δp"] == (-1.147, 0.063) and found["Same top p"] == (89.711, 0.348)


@pytest.mark.parametrize(("log", "part"), [
    (LOG, "gave no statistics for"),
    (LOG + "E Unexpected negative standard deviation", "it ends with"),
    ("0.0 E kl_divergence: inconsistent vocabulary (7 vs 9)\n" + LOG + LAST_LINE, "inconsistent vocabulary (7 vs 9)"),
    (LOG.replace("12.625573 ±   0.398792", "nan ± nan") + LAST_LINE, "Mean PPL(Q) is nan"),
])
def test_log_without_figures(log, part, monkeypatch):
    """llama-perplexity exits with 0 in all these cases."""
    monkeypatch.setattr(perplexity_run, "run_tool", lambda *args: log)
    with pytest.raises((RuntimeError, UserError)) as e:
        perplexity_run.kl_divergence(MODEL, perplexity_run.BaseLogits(Path("logits"), 256, 4096, 60), threads=1)
    assert part in str(e.value)


def test_last_lines_are_not_lost(model, tmp_path):
    """Upstream leaves its log thread at exit as it is: with the processors busy two of five short runs lost their result."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT.read_bytes()[:8000])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        for _ in range(8):  # all right by chance: 0.6^8, 1.7 %
            perplexity_run.perplexity(model, text, n_ctx=128, n_chunks=2)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_logits_of_something_else_are_not_used(model, tmp_path, monkeypatch):
    """Saved logits are those of a model, a text, a context length and a number of chunks."""
    def saved(path: Path) -> perplexity_run.BaseLogits:
        path.write_bytes(b"")
        return perplexity_run.BaseLogits(path, 256, 4096, 60)

    made = []
    monkeypatch.setattr(perplexity, "save_base_logits", lambda model, text, out, *args: made.append(out) or saved(out))
    other = tmp_path / "other.txt"
    other.write_text("import os\n")
    for args, text, digest in [([], TEXT, "model"), ([], TEXT, "other model"), ([], other, "model"), (["-c", "128"], TEXT, "model"),
                               (["--chunks", "7"], TEXT, "model")]:
        perplexity.base_logits(perplexity.build_parser().parse_args(args), text, digest, tmp_path)
    assert len({path.name for path in made}) == 5


def test_split_text(tmp_path):
    """The parts are the text, cut between characters, and what the baseline scores is before the cut."""
    scored, rest = perplexity_run.split_text(TEXT, tmp_path)
    assert scored.read_bytes() + rest.read_bytes() == TEXT.read_bytes()
    assert scored.stat().st_size > 4 * rest.stat().st_size > 0
    (tmp_path / "odd.txt").write_bytes("é".encode() * 100 + b"\xff\r\n")
    scored, rest = perplexity_run.split_text(tmp_path / "odd.txt", tmp_path)
    assert scored.read_text("utf-8") == "é" * 85 and rest.read_bytes().endswith(b"\xff\r\n")


def test_incomplete_logits(out, logits_dir, tmp_path):
    """As a full disk leaves them; the size of a complete file is computed, not guessed."""
    (saved,) = logits_dir.iterdir()
    logits = perplexity_run.BaseLogits.read(saved)
    assert (logits.n_ctx, logits.n_vocab, logits.n_chunks) == (256, 4096, N_CHUNKS)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"needed {saved.stat().st_size:,}"):
        perplexity_run.BaseLogits.read(cut)
    cut.write_bytes(b"_logits_")
    with pytest.raises(UserError, match="holds no logits"):
        perplexity_run.BaseLogits.read(cut)
