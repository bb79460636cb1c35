"""ggml-ext-graph: what a model's graph does with each tensor, the types that follow, and files that do not run."""

import re
import subprocess

import pytest

from ggml_ext._native.graph import PROGRAM, find_run_error, read_uses
from ggml_ext._native.programs import find_tool
from ggml_ext._plan import uses as _uses
from helpers.architectures import write_models
from helpers.commands import quantize, run_quantize
from helpers.errors import check_error
from helpers.models import read_tensors
from helpers.prediction import add_prediction_layer


@pytest.fixture(autouse=True)
def program():
    if find_tool(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not built into the installed package")


def test_graph_lists_uses_of_tensors(model):
    uses, tensors = read_uses([model]), read_tensors(model)
    assert all(uses[n] == {"product"} for n, t in tensors.items() if n.startswith("blk.") and len(t.shape) > 1)
    assert "rows" in uses["token_embd.weight"] and uses["output_norm.weight"] == {"MUL"}
    assert find_run_error([model]) is None


def test_truncated_file_has_no_uses(model, tmp_path):
    (tmp_path / "in.gguf").write_bytes(model.read_bytes()[:100_000])
    assert read_uses([tmp_path / "in.gguf"]) is None and "exited with 1: " in find_run_error([tmp_path / "in.gguf"])


@pytest.mark.parametrize("flags", [["--type", "itq2_t"], ["--type", "iq2_xs"], ["--target-bpw", "4"]], ids=" ".join)
def test_prediction_layers_have_a_minimum_type(model, tmp_path, flags):
    source = add_prediction_layer(model, tmp_path / "in.gguf")
    done = run_quantize(source, *flags, "--dry-run", "--calibration-chunks", "2")
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"note: (\d tensors in \d classes, which the model does not use for text.*)", done.stderr)
    assert line.endswith("nextn.eh_proj in layer 8")
    assert re.search(r"blk\.8\.nextn\S+proj\.weight\s+512x256\s+f16 -> q5_k", done.stdout)


def test_verify_runs_a_token(model, tmp_path, monkeypatch):
    """A matrix in four bits that the graph adds element by element fails, if the plan does not know its use."""
    (source,) = write_models("qwen4exp", tmp_path)
    result = quantize(source, tmp_path / "good.gguf", "--type", "q4_0", "--verify")
    assert "without a difference; one token run" in result.stdout and "ple_norm_key, ple_norm_query, ple_norm_conv, ple_conv1d in layer 0" in result.stderr
    monkeypatch.setattr(_uses, "read_uses", lambda parts: None)
    check_error(run_quantize(source, tmp_path / "bad.gguf", "--type", "q4_0", "--verify"), "--verify: ", "does not run where", PROGRAM)
    assert not (tmp_path / "bad.gguf").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["itq2_t", "q4_k_m"])
def test_every_architecture_is_quantized_and_runs(tmp_path, name):
    """Quantizes with calibration and computes the perplexity of one chunk."""
    models, failures = write_models("all", tmp_path), {}
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 120)
    for source in models:
        out = tmp_path / "out.gguf"
        done = run_quantize(source, out, "--force", "--type", name, "--imatrix-from", text, "--calibration-chunks", "2", "--verify", "-t", "2")
        if done.returncode or "one token run" not in done.stdout:
            failures[source.stem] = done.stderr.splitlines()[-1:]
            continue
        done = subprocess.run([find_tool("llama-perplexity"), "-m", out, "-f", text, "-c", "128", "--chunks", "1", "-t", "2"], capture_output=True, text=True)
        if not re.search(r"Final estimate: PPL = \d", done.stdout + done.stderr):
            failures[source.stem] = (done.stdout + done.stderr).splitlines()[-1:]
    print(f"{len(models) - len(failures)} of {len(models)} pass as {name}")
    assert not failures
