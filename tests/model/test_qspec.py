"""--spec-type qspec: emitted tokens are sampled from precise logits over a cache of precise entries.

1. Replay: the same batches without drafts give the same bytes of logits and cache, so drafts leave no trace.
2. Where no product depends on the batch (BATCHES_ALIKE), the tokens equal those of decoding one by one with precise activations.
3. Elsewhere tokens differ only where the two best logits are closer than batch sizes move two logits.
4. Sampling with a seed gives the same tokens under 2.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_ext import WEIGHT_TYPES
from helpers.commands import quantize, tool
from helpers.models import gaussian, write_gguf
from helpers.native import BUILD, ROOT, require_built
from perplexity_run import run_tool
from server import running_server

TEXT = ROOT / "data" / "heldout.txt"
TYPES = ("itq3_s", "itq3_t", "q3_k")
# The GEMM makes a column's sums depend on the number of columns. Nothing else does: the output matrix is Q6_K (F16 and Q8_0
# use tinyBLAS), no type is repacked, flash attention is on, and the cache has fewer than 512 cells (above that single queries
# split it).
BATCHES_ALIKE = {"GGML_CPU_TILED_MM": "0"}
# Drafts of 8 bits are nearly always right, so a cache that keeps them looks precise. With activations of 2 bits most are rejected.
POOR_DRAFTS = {"GGML_EXT_ACT_BITS": "2"}


@pytest.fixture(scope="module")
def files(tmp_path_factory, model) -> dict[str, Path]:
    """Quantize the blocks of the reference model, with the embeddings, which are also the output matrix, in Q6_K."""
    folder = tmp_path_factory.mktemp("qspec")
    out = {}
    for name in TYPES:
        out[name] = folder / f"{name}.gguf"
        options = ("--pure", "--token-embedding-type", "q6_k")
        if name in WEIGHT_TYPES:
            quantize(model, out[name], "--type", name, *options)
        else:
            run_tool("llama-quantize", *options, model, out[name], name.upper())
    return out


def run_driver(path: Path, monkeypatch, environment: dict[str, str], **options) -> dict:
    """Run qspec_driver.cpp and return its JSON."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [require_built(BUILD, "ggml-ext-qspec"), path, TEXT, *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(done.stdout)
    assert report["drafted"] > 0 and report["state_bytes"] > 0 and report["emitted"] >= options.get("tokens", 96)
    return report


def assert_replayed(report: dict) -> None:
    assert report["different_logits"] == 0 and report["same_state"]


@pytest.mark.parametrize("layout", [{}, {"sequences": 3}, {"sequences": 3, "unified": 0}, {"flash_attn": 0}, {"ctx": 256, "gamma": 7}],
                         ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()) or "default")
@pytest.mark.parametrize("name", TYPES)
def test_drafts_leave_no_trace_in_the_cache(files, name, layout, monkeypatch):
    report = run_driver(files[name], monkeypatch, POOR_DRAFTS, **layout)
    assert_replayed(report)
    assert report["rejected"] > 5, "drafts of 2 bits were all right: this proves nothing"


@pytest.mark.parametrize("gamma", (1, 3, 6))
@pytest.mark.parametrize("temp", (0, 0.8), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", TYPES)
def test_tokens_equal_those_of_decoding_one_by_one(files, name, temp, gamma, monkeypatch):
    report = run_driver(files[name], monkeypatch, BATCHES_ALIKE | POOR_DRAFTS, gamma=gamma, temp=temp, tokens=200)
    assert_replayed(report)
    assert report["batch_difference"] == 0 and report["divergences"] == []
    assert report["rejected"] > 5


@pytest.mark.parametrize("name", TYPES)
def test_batch_sizes_change_tokens_only_between_near_equal_logits(files, name, monkeypatch):
    report = run_driver(files[name], monkeypatch, POOR_DRAFTS, sequences=3, gamma=5, prompt=200, tokens=200, ctx=1024)
    assert_replayed(report)
    # Each of the two best logits may move by the difference between replayed and single decoding, over all logits and positions.
    assert all(d["gap"] <= 2 * report["batch_difference"] for d in report["divergences"])
    assert 0 < report["batch_difference"] < 0.5  # the spread of logits is about 3
    print(f"{name}: {len(report['divergences'])} of {report['emitted']} tokens differ from decoding one by one")


def test_8_bit_drafts_are_nearly_always_accepted(files, monkeypatch):
    report = run_driver(files["itq3_t"], monkeypatch, {}, gamma=3, tokens=200)
    assert report["rejected"] < 0.1 * report["drafted"]


# --- through llama-server ----------------------------------------------------------------------------------------------

OPTIONS = ("--ctx-size", 480, "--parallel", 1, "--threads", 1, "--no-webui", "--flash-attn", "on", "--no-cache-prompt")
PROMPTS = ("import os\nimport", "def add(a, b):\n", "class Reader:\n    def __init__(self")


def complete(url: str, prompt: str, **body) -> dict:
    request = urllib.request.Request(url + "/completion", json.dumps({"prompt": prompt, "n_predict": 96, **body}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def read_metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = re.findall(r'^llamacpp:(\S+) (\S+)$', answer.read().decode(), re.M)
    return {name: float(value) for name, value in lines}


def run_server(path: Path, *args, **kwargs):
    return running_server(path, *OPTIONS, *args, program=tool("llama-server"), **kwargs)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 42}], ids=("greedy", "sampled"))
def test_server_matches_precise_activations(files, sampling, monkeypatch, tmp_path):
    for name, value in (BATCHES_ALIKE | POOR_DRAFTS).items():
        monkeypatch.setenv(name, value)
    path = files["itq3_t"]
    with run_server(path, "--act-prec", "f16") as url:
        expected = [complete(url, prompt, **sampling)["content"] for prompt in PROMPTS]
    # The precision on the command line has no effect.
    with run_server(path, "--spec-type", "qspec", "--spec-draft-n-max", 4, "--act-prec", "q8", "--metrics", "-lv", 4, log=tmp_path / "log") as url:
        answers = [complete(url, prompt, **sampling) for prompt in PROMPTS]
        counted = read_metrics(url)
    assert [a["content"] for a in answers] == expected
    assert all(0 < a["timings"]["draft_n_accepted"] < a["timings"]["draft_n"] for a in answers)
    assert counted["spec_decode_num_draft_tokens_total"] == sum(a["timings"]["draft_n"] for a in answers)
    by_position = [n for name, n in counted.items() if "per_pos" in name]
    assert len(by_position) == 4 and sum(by_position) == sum(a["timings"]["draft_n_accepted"] for a in answers)
    assert re.search(r"statistics +qspec: .*#acc rate/pos = \(", (tmp_path / "log").read_text())


def test_server_combines_slots_and_ngram_drafts(files, monkeypatch):
    """Slots that draft, slots that read prompts and drafts from n-grams share batches."""
    for name, value in (BATCHES_ALIKE | POOR_DRAFTS).items():
        monkeypatch.setenv(name, value)
    path, greedy = files["itq3_s"], {"temperature": 0}
    with run_server(path, "--act-prec", "f16") as url:
        expected = [complete(url, prompt, **greedy)["content"] for prompt in PROMPTS]
    options = ("--spec-type", "qspec,ngram-simple", "--spec-ngram-simple-size-n", 4, "--spec-ngram-simple-size-m", 6)
    with run_server(path, *options, "--parallel", 3, "--kv-unified") as url, concurrent.futures.ThreadPoolExecutor(3) as pool:
        report = [*pool.map(lambda prompt: complete(url, prompt, **greedy)["content"], PROMPTS)]
    assert report == expected


def copy_vocabulary(writer: gguf.GGUFWriter, model: Path, architecture: dict[str, object]) -> None:
    for name, field in gguf.GGUFReader(model).fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for name, value in architecture.items():
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{writer.arch}.{name}", value, kind)


def write_tiny(path: Path, model: Path, arch: str) -> Path:
    """Write a model of random weights with one block of 64 values: Mamba, which is recurrent, or Gemma 2, with a sliding window."""
    d, n_vocab = 64, 4096
    tensors = {"token_embd.weight": gaussian(n_vocab, d), "output_norm.weight": np.ones(d, np.float32)}
    common = {"context_length": 1024, "embedding_length": d, "block_count": 2, "vocab_size": n_vocab, "attention.layer_norm_rms_epsilon": 1e-5}
    if arch == "mamba":
        inner, state, rank = 2 * d, 16, 4
        fields = {"feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": inner,
                  "ssm.state_size": state, "ssm.time_step_rank": rank}
        block = {"attn_norm.weight": np.ones(d, np.float32), "ssm_in.weight": gaussian(2 * inner, d), "ssm_conv1d.weight": gaussian(inner, 4),
                 "ssm_conv1d.bias": np.zeros(inner, np.float32), "ssm_x.weight": gaussian(rank + 2 * state, inner),
                 "ssm_dt.weight": gaussian(inner, rank), "ssm_dt.bias": np.zeros(inner, np.float32), "ssm_a": -np.ones((inner, state), np.float32),
                 "ssm_d": np.ones(inner, np.float32), "ssm_out.weight": gaussian(d, inner)}
    else:
        fields = {"feed_forward_length": 2 * d, "attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 32,
                  "attention.value_length": 32, "attention.sliding_window": 64}
        block = {f"{name}.weight": np.ones(d, np.float32) for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")}
        block |= {f"{name}.weight": gaussian(d, d) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        block |= {"ffn_gate.weight": gaussian(2 * d, d), "ffn_up.weight": gaussian(2 * d, d), "ffn_down.weight": gaussian(d, 2 * d)}
    tensors |= {f"blk.{i}.{name}": values for i in range(2) for name, values in block.items()}
    return write_gguf(path, tensors, "F32", arch, lambda writer: copy_vocabulary(writer, model, common | fields))


def start_error(program: str, path: Path, *args) -> str:
    """Return the one error line of a program that must exit with 1."""
    done = subprocess.run([*map(str, [tool(program), "-m", path, *args])], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)
    lines = re.findall(r"error: .*", done.stdout + done.stderr)
    assert done.returncode == 1 and len(lines) == 1, (done.returncode, done.stdout + done.stderr)
    return lines[0]


@pytest.mark.parametrize("program", ("llama-server", "llama-cli"))
@pytest.mark.parametrize("args,message", [
    (("--spec-draft-n-max", 0), "--spec-draft-n-max 0 drafts no tokens; it needs 1 or more"),
    (("--spec-draft-n-max", 64, "--batch-size", 64, "--parallel", 1), "1 slots verify up to 65 tokens at once, a batch holds 64"),
    (("--spec-draft-n-max", 31, "--batch-size", 64, "--parallel", 3), "3 slots verify up to 96 tokens at once, a batch holds 64"),
    (("--backend-sampling",), "--backend-sampling would sample from drafts too; leave it out"),
    (("--spec-type", "draft-mtp"), "'draft-mtp' drafts with a context of its own"),
    (("--spec-draft-model", "itself"), "the model drafts for itself: leave --spec-draft-model out"),
], ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)))
def test_unsupported_options_are_refused(files, program, args, message):
    path = files["itq3_t"]
    args = [path if a == "itself" else a for a in args]
    assert message in start_error(program, path, "--spec-type", "qspec", "--ctx-size", 512, *args)


@pytest.mark.parametrize("arch,message", [("mamba", "the model is recurrent"), ("gemma2", "sliding window of 64 tokens")])
def test_unsupported_models_are_refused(arch, message, model, tmp_path):
    path = write_tiny(tmp_path / f"{arch}.gguf", model, arch)
    assert message in start_error("llama-server", path, "--spec-type", "qspec", "--ctx-size", 512)
    with run_server(path) as url:  # the model loads without qspec
        complete(url, PROMPTS[0], n_predict=4)


def test_full_size_sliding_window_is_accepted(model, tmp_path):
    path = write_tiny(tmp_path / "gemma2.gguf", model, "gemma2")
    with run_server(path, "--spec-type", "qspec", "--swa-full") as url:
        assert complete(url, PROMPTS[0], n_predict=90, ignore_eos=True)["timings"]["draft_n"] > 0


def test_backend_sampling_request_is_refused(files):
    with run_server(files["itq3_t"], "--spec-type", "qspec") as url:
        with pytest.raises(urllib.error.HTTPError) as error:
            complete(url, PROMPTS[0], backend_sampling=True)
        answer = json.load(error.value)["error"]
        assert error.value.code == 400 and "backend_sampling does not work with --spec-type qspec" in answer["message"]
        assert complete(url, PROMPTS[0])["tokens_predicted"] > 0  # the server still runs
