"""ggml-ext-graph: what models' graphs do with their tensors, types that follow from it, and files that do not run."""

import re
import subprocess

import pytest

from ggml_ext._native.graph import PROGRAM, find_run_error, read_uses
from ggml_ext._native.programs import find_tool
from ggml_ext._plan import uses as _uses
from helpers.architectures import make
from helpers.commands import quantize, run_quantize
from helpers.errors import check_error
from helpers.models import read_tensors
from helpers.prediction import add_prediction_layer


@pytest.fixture(autouse=True)
def program():
    if find_tool(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not built into the installed package")


def test_uses_of_a_model(model):
    found, tensors = read_uses([model]), read_tensors(model)
    assert all(found[n] == {"product"} for n, t in tensors.items() if n.startswith("blk.") and len(t.shape) > 1)
    assert "rows" in found["token_embd.weight"] and found["output_norm.weight"] == {"MUL"}
    assert find_run_error([model]) is None


def test_what_llama_cpp_does_not_load(model, tmp_path):
    (tmp_path / "in.gguf").write_bytes(model.read_bytes()[:100_000])
    assert read_uses([tmp_path / "in.gguf"]) is None and "exited with 1: " in find_run_error([tmp_path / "in.gguf"])


@pytest.mark.parametrize("flags", [["--type", "itq2_t"], ["--type", "iq2_xs"], ["--target-bpw", "4"]], ids=" ".join)
def test_layers_that_predict_tokens_have_a_floor(model, tmp_path, flags):
    source = add_prediction_layer(model, tmp_path / "in.gguf")
    done = run_quantize(source, *flags, "--dry-run", "--calibration-chunks", "2")
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"note: (\d tensors in \d classes, which the model does not run on text.*)", done.stderr)
    assert line.endswith("nextn.eh_proj in layer 8")
    assert re.search(r"blk\.8\.nextn\S+proj\.weight\s+512x256\s+f16 -> q5_k", done.stdout)


def test_verify_runs_a_token(model, tmp_path, monkeypatch):
    """A matrix that the graph adds element by element, in four bits, where nothing has told that."""
    (source,) = make("qwen4exp", tmp_path)
    done = quantize(source, tmp_path / "good.gguf", "--type", "q4_0", "--verify")
    assert "as they were written, and one token run" in done.stdout and "ple_norm_key, ple_norm_query, ple_norm_conv, ple_conv1d in layer 0" in done.stderr
    monkeypatch.setattr(_uses, "read_uses", lambda parts: None)
    check_error(run_quantize(source, tmp_path / "bad.gguf", "--type", "q4_0", "--verify"), "--verify: ", "does not run where", PROGRAM)
    assert not (tmp_path / "bad.gguf").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["itq2_t", "q4_k_m"])
def test_every_architecture_is_quantized_and_runs(tmp_path, name):
    """With calibration, and a chunk of text whose perplexity is a number."""
    models, wrong = make("all", tmp_path), {}
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 120)
    for source in models:
        out = tmp_path / "out.gguf"
        done = run_quantize(source, out, "--force", "--type", name, "--imatrix-from", text, "--calibration-chunks", "2", "--verify", "-t", "2")
        if done.returncode or "one token run" not in done.stdout:
            wrong[source.stem] = done.stderr.splitlines()[-1:]
            continue
        ran = subprocess.run([find_tool("llama-perplexity"), "-m", out, "-f", text, "-c", "128", "--chunks", "1", "-t", "2"], capture_output=True, text=True)
        if not re.search(r"Final estimate: PPL = \d", ran.stdout + ran.stderr):
            wrong[source.stem] = (ran.stdout + ran.stderr).splitlines()[-1:]
    print(f"{len(models) - len(wrong)} of {len(models)} pass as {name}")
    assert not wrong
