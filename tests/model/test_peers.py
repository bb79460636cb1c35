"""scripts/tools/peers.py on the reference model: its figures, resuming, errors, and the hub as it calls it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

import peers
import perplexity_run
from ggml_ext._base.errors import UserError
from ggml_ext._evaluation.figures import Figure, chunk_sums, compare_paired
from helpers.errors import fill_disk
from helpers.hub_server import TOKEN, Repository, serving
from helpers.models import MODEL, ROOT

TEXT = ROOT / "data" / "heldout.txt"
LOCAL = ("--model", MODEL, "--text", TEXT, "-c", 256, "--chunks", 4, "--types", "itq2_t", "-t", 1)
FAST = "--effort fast --no-calibration"


def run(*args) -> None:
    peers.main([*map(str, args)])


def read(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def first_window(n_ctx: int) -> float:
    """Return the script's sum of -ln p over the first window of n_ctx tokens."""
    protocol = replace(peers.PROTOCOLS["llama31-8b"], n_ctx=n_ctx)
    return (n_ctx - 1) * peers.Measurement(protocol, TEXT, 2, None, 1, ()).measure(MODEL)["ppl"][0]


@pytest.mark.slow
def test_all_tokens_of_a_window_are_scored():
    """The first window of 512 tokens has those of the first window of 256, one token more, and the half that llama-perplexity usually scores."""
    log = perplexity_run.run_tool("llama-perplexity", "-m", MODEL, "-f", TEXT, "-t", 1, "--chunks", 2, "-c", 512, "-b", 512)
    second_half = 255 * chunk_sums(log)[0]
    token = first_window(512) - first_window(256) - second_half
    assert 0 < token < 15 and second_half > 200


@pytest.mark.slow
def test_perplexity_of_a_local_model(tmp_path, capsys, monkeypatch):
    run("llama31-8b", "--out", tmp_path, *LOCAL, "--options", FAST)
    results = read(tmp_path)
    original, quantized = (results["files"][name] for name in ("original", "itq2_t"))
    assert results["run"] | {"chunks": 4, "n_ctx": 256, "is_kld": False, "model": MODEL.name} == results["run"]
    assert len(original["ppl"]) == 4 and quantized["layers_bpw"] == 2.0625 and quantized["bpw"] > 2.5 and quantized["weights"].keys() == {"itq2_t"}
    difference = compare_paired(quantized["ppl"], original["ppl"])
    assert difference.value > 3 * difference.error > 0
    text = (tmp_path / "results.md").read_text()
    assert text == capsys.readouterr().out and f"{difference.value:+.5f} +- {difference.error:.5f}" in text
    assert f"| {math.exp(peers.mean(original['ppl']).value):.4f} +- " in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.json", "results.md"]
    # Finished types are not measured again; another type is added, and other settings are refused.
    monkeypatch.setattr(peers.Measurement, "measure", lambda *args: pytest.fail("measured again"))
    run("llama31-8b", "--out", tmp_path, *LOCAL, "--options", FAST)
    assert read(tmp_path) == results
    with pytest.raises(UserError, match="results.json has results with options .*name another --out"):
        run("llama31-8b", "--out", tmp_path, *LOCAL)


@pytest.mark.slow
def test_divergence_of_a_local_model(tmp_path, monkeypatch):
    """An interruption after quantization leaves the logits and the file, which the next run uses."""
    def stop(*args):
        raise RuntimeError("stopped")

    with monkeypatch.context() as m:
        m.setattr(peers.Measurement, "measure", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            run("qwen38-27b", "--out", tmp_path, *LOCAL, "--options", FAST)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["itq2_t.gguf", "logits.bin", "results.json"]
    with pytest.raises(UserError, match="results.json has results with chunks 4, now 5: name another --out"):
        run("qwen38-27b", "--out", tmp_path, *LOCAL, "--options", FAST, "--chunks", 5)
    monkeypatch.setattr(peers, "run_quantize", stop)
    run("qwen38-27b", "--out", tmp_path, *LOCAL, "--options", FAST, "--keep")
    (row,) = read(tmp_path)["files"].values()
    assert peers.mean(row["kld"]).value == pytest.approx(row["statistics"]["Mean KLD"][0], abs=1e-5) and row["statistics"]["99.0% KLD"][0] > 0
    assert "| KL divergence | median | top-1 agreement, % |" in (tmp_path / "results.md").read_text() and (tmp_path / "itq2_t.gguf").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(peers.PROTOCOLS))
def test_protocols_with_default_options(name, tmp_path):
    """Includes --propagate and a standard type."""
    run(name, "--out", tmp_path, *LOCAL[:-4], "--types", "itq3_t,q3_k_m", "-t", 2)
    assert list(read(tmp_path)["files"])[-2:] == ["itq3_t", "q3_k_m"] and "--propagate" in read(tmp_path)["run"]["options"]


def test_bad_options_are_refused(tmp_path, monkeypatch):
    for args, message in [
        (("--ctx-size", 500), "--ctx-size 500: needed a multiple of 256"),
        (("--chunks", 1), "--chunks 1: needed at least 2"),
        (("--text", tmp_path / "no.txt"), "--text .*no.txt: no such file"),
        (("--chunks", 100000), "--text .*: has .* tokens, 100000 windows of 256 need 25,600,000"),
    ]:
        with pytest.raises(UserError, match=message):
            run("llama31-8b", "--out", tmp_path / "out", *LOCAL, *args)
    fill_disk(monkeypatch, 1000)
    with pytest.raises(UserError, match="no space left on device: llama31-8b in --out needs"):
        run("llama31-8b", "--out", tmp_path / "out", *LOCAL)
    assert list((tmp_path / "out").iterdir()) == []


def test_mean_of_cumulative_sums():
    assert peers.mean([1.0, 3.0, 6.0]) == pytest.approx(Figure(2.0, math.sqrt(1 / 3)))


@pytest.mark.extra_build
def test_model_of_a_hub_is_measured(tmp_path):
    """With the real client and a local server. The converted model stays for the next run."""
    with serving() as hub:
        hub.repositories["Qwen/Qwen3-8B"] = Repository({"model-F16.gguf": MODEL.read_bytes()})
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        script = ROOT / "scripts" / "tools" / "peers.py"
        out = tmp_path / "out"
        command = [sys.executable, script, "qwen3-8b", "--out", out, *LOCAL[2:-4], "--types", "q8_0", "-t", 1, "--options=--no-calibration"]
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        gated = subprocess.run([*map(str, command[:2]), "llama31-8b", *map(str, command[3:])], env=env | {"HF_TOKEN": ""}, capture_output=True, text=True)
    results = read(out)
    assert results["run"]["model"] == "Qwen/Qwen3-8B" and list(results["files"]) == ["original", "q8_0"] and results["files"]["original"]["weights"].keys() == {"bf16"}
    difference = compare_paired(results["files"]["q8_0"]["ppl"], results["files"]["original"]["ppl"])
    assert abs(difference.value) < 0.01
    assert gated.returncode == 1 and gated.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in gated.stderr
    assert sorted(p.name for p in out.iterdir()) == ["original.gguf", "results.json", "results.md"]


def install(monkeypatch, name: str, **content) -> None:
    module = ModuleType(name)
    module.__dict__.update(content, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, module)


def test_model_and_text_come_from_the_hub(tmp_path, monkeypatch):
    """The hub's clients are replaced: no test downloads anything. The model is converted once, to 16 bits."""
    calls, commands = [], []
    rows = SimpleNamespace(to_pylist=lambda: ["", " = A = \n", " ", "b"])
    table = SimpleNamespace(column=lambda name: {"text": rows}[name])
    files = [SimpleNamespace(rfilename="model.safetensors", size=1000), SimpleNamespace(rfilename="README.md", size=10**15)]
    api = SimpleNamespace(model_info=lambda repo, files_metadata: SimpleNamespace(siblings=files))
    install(monkeypatch, "huggingface_hub", errors=None, constants=None, hf_hub_download=lambda *args, **kwargs: calls.append((args, kwargs)) or "rows.parquet", HfApi=lambda: api)
    install(monkeypatch, "pyarrow", parquet=SimpleNamespace(read_table=lambda file, columns: table))
    monkeypatch.setattr(peers, "run_quantize", lambda *args: commands.append(args))
    args = peers.build_parser().parse_args(["llama31-8b", "--out", str(tmp_path)])
    model, text = peers.prepare(args, peers.PROTOCOLS["llama31-8b"])
    assert text.read_text() == "\n\n = A = \n\n\n \n\nb" and commands == [("--hf-repo", "meta-llama/Llama-3.1-8B-Instruct", model, "--type", "bf16")]
    assert peers.fetch_text(peers.OPENWEBTEXT, tmp_path / "b.txt").read_text() == " = A = \n\n\nb"
    assert calls[1][1] == {"repo_type": "dataset", "revision": "refs/convert/parquet"}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow: pip install huggingface-hub pyarrow, or pass --text FILE"):
        peers.fetch_text(peers.WIKITEXT, text)
