"""ggml-ext evaluate --needle, and paired differences of answers."""

from __future__ import annotations

import json
import math
import os
import struct

import numpy as np
import pytest

from ggml_ext import evaluate as evaluator
from ggml_ext._base.errors import UserError
from ggml_ext._commands.evaluating import TEXT
from ggml_ext._evaluation.figures import parse_answers
from ggml_ext._evaluation.logits import BaseLogits
from ggml_ext._evaluation.needle import N_DIGITS, N_NEEDLES, NeedleScores, index_letters, list_letters, write_needle_texts
from ggml_ext._evaluation.samples import Samples
from ggml_ext._formats.gguf_file import GGUFFile
from ggml_ext._native.text_file import read_tokens
from ggml_ext._report.quality import Pair
from helpers.commands import quantize, run_main, tool
from helpers.errors import check_error, fill_disk
from helpers.models import MODEL

CONTEXT, N_TEXTS = 1024, 2


@pytest.fixture(scope="module")
def letters():
    return list_letters(GGUFFile(MODEL))


@pytest.fixture(scope="module")
def tokenize(tmp_path_factory, letters):
    tool("llama-tokenize")
    path = tmp_path_factory.mktemp("needle") / "text"

    def tokens(text: str) -> list[int]:
        path.write_text(text)
        return read_tokens(MODEL, path)

    return tokens


@pytest.fixture(scope="module")
def texts(tokenize, letters):
    return write_needle_texts(TEXT.read_text(), CONTEXT, N_TEXTS, lambda text: [letters[token] for token in tokenize(text)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tool("llama-perplexity")
    folder = tmp_path_factory.mktemp("needle")
    os.symlink(MODEL, folder / "f16.gguf")
    quantize(MODEL, folder / "q2.gguf", "--type", "itq2_t", "--effort", "fast")
    return folder


def evaluate(*args):
    return run_main(evaluator.main, *args)


def test_needles_and_questions_are_in_their_chunk(texts, tokenize, letters):
    """Each answer is in the second half, which is scored, and occurs once before, at its depth."""
    tokens = tokenize(texts.text)
    token_at = index_letters([letters[token] for token in tokens], texts.text)
    plain = "".join(letters[token] for token in tokens)
    assert len(tokens) >= N_TEXTS * CONTEXT
    for i, ends in enumerate(texts.answers):
        depths = []
        for end in ends:
            answer = plain[end - N_DIGITS : end]
            sentence = plain[:end][plain[:end].rindex("Thepassnumber") :]
            hidden = plain.index(sentence)
            assert answer.isdigit() and plain.count(answer) == 2 and hidden < end - len(sentence)
            assert i * CONTEXT <= token_at[hidden] and CONTEXT // 2 < token_at[end - N_DIGITS] - i * CONTEXT and token_at[end - 1] < (i + 1) * CONTEXT
            depths.append(int(token_at[hidden]) - i * CONTEXT)
        asked = token_at[min(ends) - 1] - i * CONTEXT
        assert np.array(depths) / asked == pytest.approx((np.arange(N_NEEDLES) + 0.5) / N_NEEDLES, abs=0.06) and np.ptp(token_at[np.array(ends) - 1]) < CONTEXT // 4
        assert sorted(ends) != ends  # asked in another order


def write_logits(path, tokens: np.ndarray, n_vocab: int, predicted: np.ndarray) -> BaseLogits:
    """Write logits with probability 1/2 for the predicted token of each position, the rest for all others."""
    steps = 60000
    step = math.log(n_vocab - 1) / steps
    with path.open("wb") as file:
        file.write(BaseLogits.HEADER.pack(b"_logits_", tokens.shape[1], n_vocab, len(tokens)) + tokens.astype("<i4").tobytes())
        for row in predicted[:, CONTEXT // 2 + 1 :]:
            for token in row:
                values = np.zeros(n_vocab, "<u2")
                values[token] = steps
                file.write(struct.pack("<ff", step, math.log(0.5 / (n_vocab - 1))) + values.tobytes())
    return BaseLogits.read(path)


def test_known_predictions_are_scored(texts, tokenize, letters, tmp_path):
    """The model predicts all tokens of the first text; in the second it errs in the answer to the deepest needle."""
    tokens = np.array(tokenize(texts.text)[: N_TEXTS * CONTEXT]).reshape(N_TEXTS, CONTEXT)
    token_at = index_letters([letters[token] for token in tokens.ravel()], texts.text)
    predicted = tokens.copy()
    last = token_at[texts.answers[1][-1] - 1]
    predicted.ravel()[last] = (tokens.ravel()[last] + 1) % len(letters)
    scores = texts.score(write_logits(tmp_path / "logits.bin", tokens, len(letters), predicted), letters)
    assert (scores.right[0] == 100).all() and scores.right[1].tolist() == [100.0] * (N_NEEDLES - 1) + [0.0]
    n_tokens = np.array([[len(np.unique(token_at[end - N_DIGITS : end])) for end in ends] for ends in texts.answers])
    expected = n_tokens * math.log(0.5)
    expected[1, -1] += math.log(1 / (len(letters) - 1))
    assert scores.log_p == pytest.approx(expected, abs=1e-3)
    right, log_p = scores.totals()
    assert right == pytest.approx((95, 5)) and log_p.value == pytest.approx(expected.mean(), abs=1e-3)
    by_depth, _ = scores.by_depth()
    assert [figure.value for figure in by_depth] == [100, 100, 100, 100, 75]
    assert (scores - scores).totals()[1] == (0.0, 0.0)


def test_unusable_texts_are_refused(tokenize, letters):
    def letters_of(text: str) -> list[str]:
        return [letters[token] for token in tokenize(text)]

    with pytest.raises(UserError, match="--needle: 10 sentences .* half of the 256 tokens .* pass --ctx-size 1024 or more"):
        write_needle_texts(TEXT.read_text(), 256, 2, letters_of)
    with pytest.raises(UserError, match="--needle: the text has .* tokens in lines of ASCII characters, needs 256: pass another one"):
        write_needle_texts("def f(x):\n    return x\n" * 5, CONTEXT, 2, letters_of)
    with pytest.raises(UserError, match="--needle: the model's tokenizer changes letters"):
        write_needle_texts(TEXT.read_text(), CONTEXT, 2, lambda text: [word.lower() for word in letters_of(text)])
    short = write_needle_texts("word and another word\n" * 80, CONTEXT, 2, letters_of)  # the text is repeated
    assert len(tokenize(short.text)) >= 2 * CONTEXT


def test_bad_needle_options_are_refused(folder, tmp_path, monkeypatch):
    check_error(evaluate(folder / "q2.gguf", "--needle", 1), "--needle: got 1")
    check_error(evaluate(folder / "q2.gguf", "--needle", 2, "-c", 256, "-q"), "--needle", "--ctx-size 1024")
    check_error(evaluate(folder / "q2.gguf", "--needle", 2, "-f", tmp_path / "no.txt"), "-f: cannot read")
    fill_disk(monkeypatch, 1000)
    check_error(evaluate(folder / "q2.gguf", "--needle", 2, "-c", CONTEXT, "-q"), "no space left on device: --needle", "--ctx-size")
    assert sorted(p.name for p in folder.iterdir()) == ["f16.gguf", "q2.gguf"]


@pytest.mark.slow
def test_needles_of_two_files_are_compared(folder):
    done = evaluate(folder / "f16.gguf", folder / "q2.gguf", "--needle", N_TEXTS, "-c", CONTEXT, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    first, second = (model["needles"]["log_probability"] for model in report["models"])
    (pair,) = report["paired"]
    assert pair["needles"]["log_probability"]["total"][0] == pytest.approx(second["total"][0] - first["total"][0])
    assert [d[0] for d in pair["needles"]["log_probability"]["by_depth"]] == pytest.approx([b[0] - a[0] for a, b in zip(first["by_depth"], second["by_depth"])])
    assert "ln_ratio" not in pair and report["models"][0]["statistics"] == {} and report["ctx_size"] == CONTEXT
    assert not [p.name for p in folder.iterdir() if "evaluation" in p.name]
    done = evaluate(folder / "q2.gguf", "--against", folder / "f16.gguf", "--chunks", 2, "--needle", N_TEXTS, "-c", CONTEXT)
    assert done.returncode == 0 and "80-100 % deep" in done.stdout and "KL divergence" in done.stdout
    assert f"q2.gguf against f16.gguf: needles, ln p(answer) {second['total'][0] - first['total'][0]:+.4f}" in done.stdout


@pytest.mark.slow
def test_the_original_may_be_one_of_the_files(folder):
    """It is run once, and each pair of files is compared once, with all figures."""
    done = evaluate(folder / "f16.gguf", folder / "q2.gguf", "--against", folder / "f16.gguf", "--chunks", 2, "--needle", N_TEXTS, "-c", CONTEXT, "--json")
    report = json.loads(done.stdout)
    (pair,) = report["paired"]
    assert (pair["first"], pair["second"]) == ("q2.gguf", "f16.gguf") and {"ln_ratio", "kl_divergence", "top_1", "needles"} <= pair.keys()
    assert report["base"]["needles"] == report["models"][0]["needles"]


# --- paired differences

def test_answers_are_parsed():
    log = "1\t100.00000000%\t[20.6543%, 100.0000%]\n2\t50.00000000%\t[9.4531%, 90.5469%]\n3\t66.66666667%\t[1%, 2%]\n"
    assert parse_answers(log).ravel().tolist() == [100, 0, 100] and parse_answers("nothing") is None
    winogrande = "".join(f"{n}\t{100 * right / n:.4f}\t -3.1  -3.2  1  1\n" for n, right in enumerate(range(1, 1001), 1))
    assert parse_answers(winogrande).sum() == 100 * 1000
    assert Samples(answers={"hellaswag": parse_answers(log)}).scores()["hellaswag"] == pytest.approx((200 / 3, 100 / 3))


def test_differences_of_answers_have_the_error_of_mcnemars_test():
    """Of 200 tasks 12 are right only in the first model and 5 only in the second."""
    first, second = np.zeros((2, 200, 1))
    first[:100], second[12:105] = 100, 100
    samples = {"a": Samples(answers={"hellaswag": first}), "b": Samples(answers={"hellaswag": second})}
    pair = Pair.compare("a", "b", samples)
    difference = pair.scores["hellaswag"]
    assert difference.value == pytest.approx(100 * 7 / 200)
    assert difference.error == pytest.approx(100 * math.sqrt((17 / 200 - (7 / 200) ** 2) / 199))
    assert pair.lines() == ["a against b: hellaswag, % +3.50 +- 2.05, 1.7 standard errors: not significant"]
    assert Pair.compare("a", "b", {"a": samples["a"], "b": Samples(answers={"hellaswag": second[:50]})}).scores == {}


def test_lines_name_the_direction():
    scores = NeedleScores(np.tile([100.0, 0], (3, 5)), np.full((3, 10), -2.0))
    better = NeedleScores(np.full((3, 10), 100.0), np.full((3, 10), -1.0) + np.arange(3)[:, None] / 100)
    samples = {"a": Samples([1.0, 2.0], [0.1, 0.2], [90.0, 180.0], needles=scores), "b": Samples([1.1, 2.3], [0.3, 0.6], [80.0, 161.0], needles=better)}
    lines = Pair.compare("b", "a", samples).lines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        "higher perplexity", "higher KL divergence", "lower agreement", "more right answers", "more probable answers",
    ]
    assert lines[2] == "b against a: top-1 agreement, % -9.50 +- 0.50, 19.0 standard errors: lower agreement"
