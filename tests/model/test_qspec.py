"""--spec-type qspec: what it emits is sampled from precise logits over a cache of precise entries alone.

1. Replay: the same batches without drafts give the same bytes of logits and of the cache, so drafts leave nothing behind.
2. Where no product depends on the batch (BATCHES_ALIKE) the tokens are those of decoding one by one with precise activations.
3. Elsewhere tokens differ only where the two best logits lie closer than batch sizes move two logits.
4. Sampling with a seed under 2 gives the same tokens.
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
# What makes sums of one column depend on how many there are: tiled GEMM. The rest holds by itself: the output matrix is Q6_K (F16
# and Q8_0 go through tinyBLAS), no type is one that is repacked, flash attention is on, and the cache has fewer than 512 cells (from
# there on single queries split it).
BATCHES_ALIKE = {"GGML_CPU_TILED_MM": "0"}
# Drafts of 8 bits are nearly always right, and a cache that they stay in passes for a precise one: with activations of 2 bits most
# are rejected.
POOR_DRAFTS = {"GGML_EXT_ACT_BITS": "2"}


@pytest.fixture(scope="module")
def files(tmp_path_factory, model) -> dict[str, Path]:
    """The reference model with the matrices of its blocks in a type and the embeddings, which are the output matrix, in Q6_K."""
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


def drive(path: Path, monkeypatch, environment: dict[str, str], **options) -> dict:
    """What qspec_driver.cpp prints."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [require_built(BUILD, "ggml-ext-qspec"), path, TEXT, *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(done.stdout)
    assert found["drafted"] > 0 and found["state_bytes"] > 0 and found["emitted"] >= options.get("tokens", 96)
    return found


def assert_replayed(found: dict) -> None:
    assert found["different_logits"] == 0 and found["same_state"]


@pytest.mark.parametrize("layout", [{}, {"sequences": 3}, {"sequences": 3, "unified": 0}, {"flash_attn": 0}, {"ctx": 256, "gamma": 7}],
                         ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()) or "default")
@pytest.mark.parametrize("name", TYPES)
def test_drafts_leave_nothing_in_the_cache(files, name, layout, monkeypatch):
    found = drive(files[name], monkeypatch, POOR_DRAFTS, **layout)
    assert_replayed(found)
    assert found["rejected"] > 5, "drafts of 2 bits were all right: this proves nothing"


@pytest.mark.parametrize("gamma", (1, 3, 6))
@pytest.mark.parametrize("temp", (0, 0.8), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", TYPES)
def test_tokens_are_those_of_decoding_one_by_one(files, name, temp, gamma, monkeypatch):
    found = drive(files[name], monkeypatch, BATCHES_ALIKE | POOR_DRAFTS, gamma=gamma, temp=temp, tokens=200)
    assert_replayed(found)
    assert found["batch_difference"] == 0 and found["divergences"] == []
    assert found["rejected"] > 5


@pytest.mark.parametrize("name", TYPES)
def test_where_batches_differ_tokens_differ_only_between_near_equal_logits(files, name, monkeypatch):
    found = drive(files[name], monkeypatch, POOR_DRAFTS, sequences=3, gamma=5, prompt=200, tokens=200, ctx=1024)
    assert_replayed(found)
    # Both of the two best logits may move, each by the difference; it is taken over all logits of all positions, replayed without
    # drafts, against decoding one by one.
    assert all(d["gap"] <= 2 * found["batch_difference"] for d in found["divergences"])
    assert 0 < found["batch_difference"] < 0.5  # of logits whose spread is about 3
    print(f"{name}: {len(found['divergences'])} of {found['emitted']} tokens differ from decoding one by one")


def test_drafts_of_8_bits_are_nearly_always_right(files, monkeypatch):
    found = drive(files["itq3_t"], monkeypatch, {}, gamma=3, tokens=200)
    assert found["rejected"] < 0.1 * found["drafted"]


# --- through llama-server ----------------------------------------------------------------------------------------------

OPTIONS = ("--ctx-size", 480, "--parallel", 1, "--threads", 1, "--no-webui", "--flash-attn", "on", "--no-cache-prompt")
PROMPTS = ("import os\nimport", "def add(a, b):\n", "class Reader:\n    def __init__(self")


def ask(url: str, prompt: str, **body) -> dict:
    request = urllib.request.Request(url + "/completion", json.dumps({"prompt": prompt, "n_predict": 96, **body}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = re.findall(r'^llamacpp:(\S+) (\S+)$', answer.read().decode(), re.M)
    return {name: float(value) for name, value in lines}


def server(path: Path, *args, **kwargs):
    return running_server(path, *OPTIONS, *args, program=tool("llama-server"), **kwargs)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 42}], ids=("greedy", "sampled"))
def test_server_says_what_precise_activations_say(files, sampling, monkeypatch, tmp_path):
    for name, value in (BATCHES_ALIKE | POOR_DRAFTS).items():
        monkeypatch.setenv(name, value)
    path = files["itq3_t"]
    with server(path, "--act-prec", "f16") as url:
        expected = [ask(url, prompt, **sampling)["content"] for prompt in PROMPTS]
    # the precision of the command line does not matter
    with server(path, "--spec-type", "qspec", "--spec-draft-n-max", 4, "--act-prec", "q8", "--metrics", "-lv", 4, log=tmp_path / "log") as url:
        answers = [ask(url, prompt, **sampling) for prompt in PROMPTS]
        counted = metrics(url)
    assert [a["content"] for a in answers] == expected
    assert all(0 < a["timings"]["draft_n_accepted"] < a["timings"]["draft_n"] for a in answers)
    assert counted["spec_decode_num_draft_tokens_total"] == sum(a["timings"]["draft_n"] for a in answers)
    by_position = [n for name, n in counted.items() if "per_pos" in name]
    assert len(by_position) == 4 and sum(by_position) == sum(a["timings"]["draft_n_accepted"] for a in answers)
    assert re.search(r"statistics +qspec: .*#acc rate/pos = \(", (tmp_path / "log").read_text())


def test_server_with_several_slots_and_an_ngram_type_beside(files, monkeypatch):
    """Slots that draft, slots that read prompts and drafts from n-grams in the same batches."""
    for name, value in (BATCHES_ALIKE | POOR_DRAFTS).items():
        monkeypatch.setenv(name, value)
    path, greedy = files["itq3_s"], {"temperature": 0}
    with server(path, "--act-prec", "f16") as url:
        expected = [ask(url, prompt, **greedy)["content"] for prompt in PROMPTS]
    options = ("--spec-type", "qspec,ngram-simple", "--spec-ngram-simple-size-n", 4, "--spec-ngram-simple-size-m", 6)
    with server(path, *options, "--parallel", 3, "--kv-unified") as url, concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda prompt: ask(url, prompt, **greedy)["content"], PROMPTS)]
    assert found == expected


def copy_vocabulary(writer: gguf.GGUFWriter, model: Path, architecture: dict[str, object]) -> None:
    for name, field in gguf.GGUFReader(model).fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for name, value in architecture.items():
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{writer.arch}.{name}", value, kind)


def write_tiny(path: Path, model: Path, arch: str) -> Path:
    """A model of random weights, one block of 64 values: Mamba, which is recurrent, or Gemma 2, whose window slides."""
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


def refusal(program: str, path: Path, *args) -> str:
    """The one line of an error after which the program ends with exit code 1."""
    done = subprocess.run([*map(str, [tool(program), "-m", path, *args])], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)
    lines = re.findall(r"error: .*", done.stdout + done.stderr)
    assert done.returncode == 1 and len(lines) == 1, (done.returncode, done.stdout + done.stderr)
    return lines[0]


@pytest.mark.parametrize("program", ("llama-server", "llama-cli"))
@pytest.mark.parametrize("args,said", [
    (("--spec-draft-n-max", 0), "--spec-draft-n-max 0 drafts no tokens; it needs 1 or more"),
    (("--spec-draft-n-max", 64, "--batch-size", 64, "--parallel", 1), "1 slots verify up to 65 tokens at once, a batch holds 64"),
    (("--spec-draft-n-max", 31, "--batch-size", 64, "--parallel", 3), "3 slots verify up to 96 tokens at once, a batch holds 64"),
    (("--backend-sampling",), "--backend-sampling would sample from drafts too; leave it out"),
    (("--spec-type", "draft-mtp"), "'draft-mtp' drafts with a context of its own"),
    (("--spec-draft-model", "itself"), "the model drafts for itself: leave --spec-draft-model out"),
], ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)))
def test_refused_options(files, program, args, said):
    path = files["itq3_t"]
    args = [path if a == "itself" else a for a in args]
    assert said in refusal(program, path, "--spec-type", "qspec", "--ctx-size", 512, *args)


@pytest.mark.parametrize("arch,said", [("mamba", "the model is recurrent"), ("gemma2", "sliding window of 64 tokens")])
def test_refused_models(arch, said, model, tmp_path):
    path = write_tiny(tmp_path / f"{arch}.gguf", model, arch)
    assert said in refusal("llama-server", path, "--spec-type", "qspec", "--ctx-size", 512)
    with server(path) as url:  # which load otherwise
        ask(url, PROMPTS[0], n_predict=4)


def test_a_sliding_window_kept_as_a_whole_is_taken(model, tmp_path):
    path = write_tiny(tmp_path / "gemma2.gguf", model, "gemma2")
    with server(path, "--spec-type", "qspec", "--swa-full") as url:
        assert ask(url, PROMPTS[0], n_predict=90, ignore_eos=True)["timings"]["draft_n"] > 0


def test_a_request_for_sampling_on_the_backend_is_refused(files):
    with server(files["itq3_t"], "--spec-type", "qspec") as url:
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(url, PROMPTS[0], backend_sampling=True)
        answer = json.load(error.value)["error"]
        assert error.value.code == 400 and "backend_sampling does not work with --spec-type qspec" in answer["message"]
        assert ask(url, PROMPTS[0])["tokens_predicted"] > 0  # it lives on
