"""ggml-ext evaluate on the reference model: what it prints, caches and refuses."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ggml_ext import evaluate as evaluator
from ggml_ext._commands.evaluating import TEXT
from ggml_ext._evaluation.figures import KLD, LN_RATIO, PPL, SAME_TOP, Figure, chunk_sums, compare_paired, kld_sums, top_sums
from ggml_ext._evaluation.labels import label_models
from ggml_ext._evaluation.logits import BaseLogits
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._formats.language_model import describe_other_model
from ggml_ext._native.process import run_logged
from ggml_ext._report.quality import Evaluation, Quality
from helpers.commands import quantize, run_main, tool
from helpers.errors import check_error, files, fill_disk
from helpers.models import MODEL, gaussian, write_gguf

CHUNKS = ("-c", 64, "--chunks", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tool("llama-perplexity")
    folder = tmp_path_factory.mktemp("evaluate")
    os.link(MODEL, folder / "f16.gguf") if os.stat(MODEL).st_dev == os.stat(folder).st_dev else (folder / "f16.gguf").write_bytes(MODEL.read_bytes())
    quantize(MODEL, folder / "q2.gguf", "--type", "itq2_t", "--effort", "fast")
    quantize(MODEL, folder / "q4.gguf", "--type", "itq4_t", "--effort", "fast")
    return folder


def evaluate(*args) -> subprocess.CompletedProcess:
    return run_main(evaluator.main, *args)


def evaluate_json(*args) -> dict:
    done = evaluate(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_evaluate_against_the_original(folder):
    """The figures are llama-perplexity's; the logits are cached and reused."""
    first = evaluate(folder / "q4.gguf", folder / "q2.gguf", "--against", folder / "f16.gguf", *CHUNKS)
    assert first.returncode == 0 and "MiB of logits in" in first.stderr and "built-in text" in first.stderr, first.stderr
    assert all(name in first.stdout for name in ("f16.gguf", "q4.gguf", "q2.gguf", "KL divergence", "q2.gguf against q4.gguf"))
    logits = folder / "f16.logits.bin"
    assert BaseLogits.read(logits).n_chunks == 4
    written_at = logits.stat().st_mtime_ns
    done = evaluate(folder / "q4.gguf", folder / "q2.gguf", "--against", folder / "f16.gguf", *CHUNKS, "--json")
    assert "reusing" in done.stderr and logits.stat().st_mtime_ns == written_at
    report = json.loads(done.stdout)
    four, two = (m["statistics"] for m in report["models"])
    assert 0 < four[KLD][0] < 0.1 * two[KLD][0] and four[SAME_TOP][0] > two[SAME_TOP][0]
    assert report["base"]["statistics"][PPL][0] == pytest.approx(four[PPL][0] / math.exp(four[LN_RATIO][0]), rel=1e-4)
    # The paired difference telescopes to that of both against the base: five decimals each.
    (pair,) = report["paired"]
    assert pair["ln_ratio"][0] == pytest.approx(two[LN_RATIO][0] - four[LN_RATIO][0], abs=2e-5)
    command = [tool("llama-perplexity"), "-m", folder / "q4.gguf", "-c", 64, "-b", 64, "--kl-divergence", "--kl-divergence-base", logits]
    code, log = run_logged([*map(str, command)], folder)
    assert code == 0 and f"Mean    KLD: {four[KLD][0]:10.6f}" in log
    # Logits of another text are computed again, and such a file suffices without the base.
    again = evaluate(folder / "q4.gguf", "--against", folder / "f16.gguf", "-c", 64, "--chunks", 5)
    assert again.returncode == 0 and "reusing" not in again.stderr and BaseLogits.read(logits).n_chunks == 5
    alone = evaluate_json(folder / "q4.gguf", "--base-logits", logits)
    assert alone["chunks"] == 5 and alone["ctx_size"] == 64 and alone["base"] is None and alone["models"][0]["statistics"][KLD][0] > 0


@pytest.mark.slow
def test_evaluate_without_an_original(folder):
    report = evaluate_json(folder / "f16.gguf", folder / "q2.gguf", *CHUNKS)
    f16, two = (m["statistics"][PPL][0] for m in report["models"])
    assert report["text"]["name"] == "built-in" and f16 < two
    assert report["paired"][0]["ln_ratio"][0] == pytest.approx(math.log(two / f16), abs=1e-3)  # perplexities about 70 with four decimals


@pytest.mark.slow
def test_divergence_by_position(folder):
    """The ranges cover the scored positions, and their mean is the KL divergence that llama-perplexity prints."""
    report = evaluate_json(folder / "q4.gguf", folder / "q2.gguf", "--against", folder / "f16.gguf", *CHUNKS, "--positions", 4)
    ranges = report["ranges"]
    assert ranges == [[32, 39], [39, 47], [47, 55], [55, 63]]
    lengths = [end - start for start, end in ranges]
    for model in report["models"]:
        values, errors = zip(*model["positions"], strict=True)
        # the model's log-probabilities have 16 bits here, steps of at most 16 / 65,535, and full precision there, and 6 decimals
        assert np.average(values, weights=lengths) == pytest.approx(model["statistics"][KLD][0], abs=1.3e-4) and min(errors) > 0
    (pair,) = report["paired"]
    four, two = (np.array(model["positions"])[:, 0] for model in report["models"])
    assert np.array(pair["positions"])[:, 0] == pytest.approx(two - four) and not list(folder.glob(".evaluation-*"))
    assert pair["kl_divergence"][0] == pytest.approx(report["models"][1]["statistics"][KLD][0] - report["models"][0]["statistics"][KLD][0], abs=2e-5)
    done = evaluate(folder / "q2.gguf", "--against", folder / "f16.gguf", *CHUNKS, "--positions", 2)
    assert "positions, q2.gguf" in done.stdout and "32-46" in done.stdout and "47-62" in done.stdout


def write_hellaswag(path, n):
    path.write_text("".join(f"Making a cake: She opens the oven and\n{i % 4}\n" + "".join(f"takes out cake number {e} of {i}.\n" for e in range(4)) for i in range(n)))


def write_winogrande(path, n):
    path.write_text("".join(f'{i},"The cup does not fit into the box because _ is too large.",the cup,the box,{1 + i % 2}\n' for i in range(n)))


def write_multiple_choice(path, n):
    def text(t: str) -> bytes:
        return struct.pack("<I", len(t)) + t.encode()

    def answers(right: int) -> bytes:
        return struct.pack("<I", 4) + b"".join(text(f"answer {i}") for i in range(4)) + struct.pack("<4i", *(int(i == right) for i in range(4)))

    tasks = [text(f"Question {i}?") + answers(i % 4) + answers(i % 4) for i in range(n)]
    starts = np.cumsum([0, *map(len, tasks[:-1])]) + 4 + 4 * n
    path.write_bytes(struct.pack("<I", n) + starts.astype("<u4").tobytes() + b"".join(tasks))


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_hellaswag, write_winogrande, write_multiple_choice], ids=lambda f: f.__name__.removeprefix("write_"))
def test_tasks_are_scored(folder, tmp_path, write):
    """Only the tasks run."""
    kind = write.__name__.removeprefix("write_").replace("_", "-")
    write(tmp_path / "tasks", 12)
    report = evaluate_json(folder / "f16.gguf", f"--{kind}", tmp_path / "tasks")
    (model,) = report["models"]
    value, error = model["scores"][kind]
    shares = [100 * right / n for n in (11, 12) for right in range(n + 1)]  # winogrande skips what it cannot decide
    assert model["statistics"] == {} and min(abs(value - share) for share in shares) < 1e-4
    assert any(error == pytest.approx(math.sqrt(value * (100 - value) / (n - 1)), abs=1e-6) for n in (11, 12))
    done = evaluate(folder / "f16.gguf", f"--{kind}", tmp_path / "tasks")
    assert f"{kind}, %" in done.stdout and f"{value:.2f}" in done.stdout


@pytest.mark.slow
def test_answers_of_two_files_are_compared(folder, tmp_path):
    write_hellaswag(tmp_path / "tasks", 12)
    report = evaluate_json(folder / "q2.gguf", folder / "q4.gguf", "--hellaswag", tmp_path / "tasks", "--against", folder / "f16.gguf", *CHUNKS)
    scores = {row["label"]: row["scores"]["hellaswag"][0] for row in (report["base"], *report["models"])}
    assert [(pair["first"], pair["second"]) for pair in report["paired"]] == [("q2.gguf", "f16.gguf"), ("q4.gguf", "f16.gguf"), ("q4.gguf", "q2.gguf")]
    for pair in report["paired"]:
        assert pair["scores"]["hellaswag"][0] == pytest.approx(scores[pair["first"]] - scores[pair["second"]], abs=1e-6)
    assert ["ln_ratio" in pair for pair in report["paired"]] == [False, False, True]
    top = [model["statistics"][SAME_TOP][0] for model in report["models"]]
    assert report["paired"][2]["top_1"][0] == pytest.approx(top[1] - top[0], abs=2e-3)


@pytest.mark.slow
def test_bad_tasks_are_refused(folder, tmp_path):
    (tmp_path / "tasks").write_text("one line\n")
    for kind, part in (("hellaswag", "not a multiple of 6"), ("winogrande", "winogrande_score"), ("multiple-choice", "multiple_choice_score")):
        check_error(evaluate(folder / "f16.gguf", f"--{kind}", tmp_path / "tasks", "-q"), "f16.gguf", part)
    check_error(evaluate(folder / "f16.gguf", "--hellaswag", tmp_path / "no"), "--hellaswag", "no such file")


def test_bad_command_lines_are_refused(folder, tmp_path):
    f16 = folder / "f16.gguf"
    check_error(evaluate(tmp_path / "no.gguf"), "no.gguf")
    check_error(evaluate(f16, "--against", tmp_path / "no.gguf"), "no.gguf")
    check_error(evaluate(f16, "--chunks", 1), "--chunks: got 1")
    check_error(evaluate(f16, "--tasks", 5), "--tasks", "--hellaswag")
    check_error(evaluate(f16, "--positions", 4), "--positions", "--against")
    check_error(evaluate(f16, "--against", f16, "-c", 16, "--positions", 8), "--positions: got 8", "have 7 scored positions")
    check_error(evaluate(f16, "-f", tmp_path / "no.txt"), "-f: cannot read")
    check_error(evaluate(f16, "--base-logits", f16, "-f", f16), "--base-logits without --against")
    check_error(evaluate(f16, "--base-logits", f16), "holds no logits")
    check_error(evaluate(f16, "--base-logits", "/dev/null"), "--base-logits: /dev/null is not a regular file")
    check_error(evaluate(f16, "--picture", tmp_path / "a.bmp"), "--picture", ".svg")
    check_error(evaluate(), "MODEL")


def test_short_text_is_refused(folder, tmp_path):
    (tmp_path / "short.txt").write_text("def f(x):\n    return x\n" * 10)
    check_error(evaluate(folder / "f16.gguf", "-f", tmp_path / "short.txt", "-c", 512), "short.txt", "two chunks of 512 need 1,024", "longer text")
    few = evaluate(folder / "q4.gguf", "--against", folder / "f16.gguf", "-c", 64, "--chunks", 3)
    check_error(few, "3 chunks of 64 tokens score 93", "needs 100", "--chunks")


def test_other_vocabulary_is_refused(folder, tmp_path):
    def tokens(writer):
        writer.add_token_list(["a", "b"])

    write_gguf(tmp_path / "other.gguf", {"token_embd.weight": gaussian(2, 256)}, fill=tokens)
    write_gguf(tmp_path / "none.gguf", {"token_embd.weight": gaussian(2, 256)})
    check_error(evaluate(tmp_path / "other.gguf", "--against", folder / "f16.gguf"), "other.gguf has another vocabulary", "2 and 4,096")
    check_error(evaluate(tmp_path / "none.gguf"), "none.gguf has no vocabulary")


@pytest.mark.parametrize(("arch", "keys", "what"), [
    ("bert", {}, "an encoder (bert)"), ("gemma-embedding", {}, "an encoder (gemma-embedding)"),
    ("lfm2", {"attention.causal": False, "pooling_type": 2}, "an encoder (lfm2)"), ("qwen3", {"pooling_type": 4}, "a reranker (qwen3)"),
])
def test_other_models_than_language_models_are_refused(tmp_path, arch, keys, what):
    """The refusal comes before anything runs, and does not call the file damaged."""
    def fill(writer):
        writer.add_token_list(["a", "b"])
        for key, value in keys.items():
            writer.add_bool(f"{arch}.{key}", value) if value is False else writer.add_uint32(f"{arch}.{key}", value)

    path = write_gguf(tmp_path / "e.gguf", {"token_embd.weight": gaussian(2, 256)}, arch=arch, fill=fill)
    for args in ([path], [MODEL, "--against", path], [path, "--hellaswag", path]):
        check_error(evaluate(*args), f"e.gguf is not a language model but {what}", "ggml-ext inspect")


@pytest.mark.parametrize(("arch", "keys"), [("dream", {"attention.causal": False}), ("qwen3", {"pooling_type": 3}), ("llama", {})])
def test_language_models_are_accepted(tmp_path, arch, keys):
    """Includes models for text diffusion, and embedding models that use the last token of a language model."""
    def fill(writer):
        for key, value in keys.items():
            writer.add_bool(f"{arch}.{key}", value) if value is False else writer.add_uint32(f"{arch}.{key}", value)

    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": gaussian(2, 256)}, arch=arch, fill=fill)
    assert describe_other_model(GGUFFile(path)) is None


def test_table_has_the_figures_of_json():
    """With only --base-logits there is a KL divergence but no row of the base."""
    figures = {PPL: Figure(20.0, 0.5), KLD: Figure(0.01234, 0.0005), SAME_TOP: Figure(91.5, 0.3)}
    _, heading, row, *_ = Evaluation({}, 64, 5, None, [Quality(Path("q.gguf"), "q.gguf", 1 << 20, 2.1, {"q2_k": 1}, figures)], []).lines(80)
    assert "KL divergence" in heading and "0.01234 +- 0.00050" in row and "91.50 %" in row


def test_foreign_logits_are_neither_replaced_nor_used(folder, tmp_path):
    foreign = tmp_path / "mine.bin"
    foreign.write_bytes(b"mine")
    before = files(tmp_path)
    check_error(evaluate(folder / "q4.gguf", "--against", folder / "f16.gguf", "--base-logits", foreign), "mine.bin exists", "--base-logits")
    assert files(tmp_path) == before


def test_full_disk_is_refused(folder, tmp_path, monkeypatch):
    fill_disk(monkeypatch, 1000)
    done = evaluate(folder / "q4.gguf", "--against", folder / "f16.gguf", "--base-logits", tmp_path / "logits.bin", "-q")
    check_error(done, "no space left on device", "MiB are free", "--chunks")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_disk_that_fills_up_is_reported(folder, tmp_path):
    """A limit of the file size, which llama-perplexity ignores or dies of, stands for it."""
    command = [sys.executable, "-m", "ggml_ext.evaluate", folder / "q4.gguf", "--against", folder / "f16.gguf", "--base-logits", tmp_path / "l.bin", *CHUNKS, "-q"]
    done = subprocess.run(["bash", "-c", 'ulimit -f 500; exec "$@"', "-", *map(str, command)], capture_output=True, text=True)
    check_error(done, "llama-perplexity" if re.search("exited|was ended by signal", done.stderr) else "its disk is full")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_interrupt_removes_partial_logits_and_ends_the_program(folder, tmp_path):
    command = [sys.executable, "-m", "ggml_ext.evaluate", folder / "q4.gguf", "--against", folder / "f16.gguf", "--base-logits", tmp_path / "l.bin"]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            if list(tmp_path.glob(".evaluation-*/logits.bin")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.splitlines()[-1].startswith("error: interrupted") and "Traceback" not in err
    assert not list(tmp_path.iterdir())
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1


@pytest.mark.slow
def test_picture_is_written(folder, tmp_path):
    pytest.importorskip("matplotlib")
    done = evaluate(folder / "q4.gguf", folder / "q2.gguf", *CHUNKS, "--picture", tmp_path / "p.svg", "-q")
    assert done.returncode == 0, done.stderr
    assert all(word in (tmp_path / "p.svg").read_text() for word in ("q4.gguf", "q2.gguf", "size of the file", "perplexity"))
    check_error(evaluate(folder / "q4.gguf", *CHUNKS, "--picture", tmp_path / "p.svg"), "--picture", "--force")


# --- parsing

def test_cumulative_means_become_sums():
    """Covers both kinds of logs."""
    assert chunk_sums("x\n[1]2.0000,[2]4.0000,\n") == pytest.approx([math.log(2), 2 * math.log(4)])
    log = "".join(f"{n:4d}       5.0000 ±    0.1000       {0.01 * n:8.5f} ±    0.00100       0.00500 ±    0.00010     1.000 ±  0.100 %    90.000 ±  0.500 %\n" for n in (1, 2, 3))
    assert chunk_sums(log) == pytest.approx([0.01, 0.04, 0.09]) and kld_sums(log) == pytest.approx([0.005, 0.01, 0.015])
    assert top_sums(log) == pytest.approx([90, 180, 270])


def test_paired_differences_cancel_common_noise():
    rng = np.random.default_rng(1)
    common, noise = rng.normal(3, 0.5, 400), rng.normal(0.02, 0.01, 400)
    difference = compare_paired(np.cumsum(common + noise), np.cumsum(common))
    assert difference.value == pytest.approx(noise.mean(), abs=1e-9) and difference.error == pytest.approx(noise.std(ddof=1) / 20, rel=1e-6)
    assert compare_paired([1.0], [1.0]) is None and compare_paired([1.0, 2.0], [1.0]) is None


def test_labels_are_short_and_distinct():
    assert label_models([Path("a/x.gguf"), Path("b/y.gguf")]) == ["x.gguf", "y.gguf"]
    assert label_models([Path("/m/a/x.gguf"), Path("/m/b/x.gguf")]) == ["a/x.gguf", "b/x.gguf"]
    assert label_models([Path("x.gguf"), Path("x.gguf")]) == ["x.gguf", "x.gguf"]


def test_default_text_is_installed():
    assert TEXT.stat().st_size > 150_000
