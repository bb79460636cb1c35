"""Gradients of ggml-ext-streams: against finite differences of the layers, and against numpy for the last layer."""

import json
import re
import subprocess

import gguf
import numpy as np
import pytest

import synth_model
from ggml_ext._native.streams import LayerStreams
from helpers import architectures
from helpers.commands import tool
from helpers.models import ROOT, read_tensors
from helpers.native import BUILD, require_built

# Architectures with a gated single product, norms of heads, a bound on scores, no norm before the products, parallel layers
# with biases, one product for q, k and v with a bound, and experts with one shared.
KNOWN = ("dbrx", "phi3", "qwen3", "gemma2", "olmo2", "phi2", "gptneox", "granitemoe", "llama4", "starcoder2",
         # compressed keys, no cache, no FLASH_ATTN_EXT, keys for each group of heads, bounded gates, products of activations
         "deepseek2", "dream", "grok", "minimax-m3", "gpt-oss", "minimax-01",
         # state-space models with a decay per state and per head, convolutions, delta nets
         "mamba", "nemotron_h", "lfm2", "qwen3next", "kimi-linear",
         # several residual streams, keys that an earlier layer selects
         "glm5-next", "qwen4exp", "hy_v4")
# Why the other architecture is refused.
UNKNOWN = {"deepseek4": "FLASH_ATTN_EXT to keys of another form"}
NOT_CUT = ("hrm_text",)
# The largest difference of a single operation, of the expected size of the derivative. Measured: 0.0004.
EXACT = 0.002
# Differences use e = 1/16 of a random direction. The next term is about e^2 = 0.004 times the curvature. GELU's table and the KV cache
# round to 2^-11, which e amplifies to 0.008 before averaging. Measured: at most 0.009.
NEAR = 0.03
# Along a matrix's gradient e is 1/32 and the difference far above roundings, but a norm after the matrix bends it. Measured: 0.13.
BENT = 0.5


def compare_layers(model) -> list[dict]:
    """Run backward_driver.cpp and return the differences that it prints for each layer."""
    done = subprocess.run([require_built(BUILD, "ggml-ext-backward"), model], check=True, capture_output=True, text=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def scale_gates(model):
    """Enlarge gates, whose functions are linear near 0, and remove the choice of experts, which has no gradient."""
    reader = gguf.GGUFReader(model, "r+")
    for tensor in reader.tensors:
        if re.search(r"ffn_(up|gate)\.weight", tensor.name):
            tensor.data[:] *= 4
        elif "ffn_gate_inp" in tensor.name:
            tensor.data[:] = 0
    reader.data.flush()
    return model


def check_layers(layers: list[dict]) -> None:
    """Check layers of models of test-llama-archs. Their attention scores are so small that roundings hide the gradients of q and k."""
    for layer in layers:
        for name, (exact, difference, scale) in layer["of"].items():
            if "attn_q" not in name and "attn_k" not in name and "attn_v" not in name:
                assert abs(exact - difference) <= (NEAR if name == "stream" else BENT) * scale > 0, name


@pytest.mark.parametrize("architecture", KNOWN)
def test_gradients_match_finite_differences(architecture, tmp_path):
    for model in architectures.write_models(architecture, tmp_path):
        n_layers = gguf.GGUFReader(model).fields[f"{architecture}.block_count"].contents()
        layers = compare_layers(scale_gates(model))
        assert [f["layer"] for f in layers] == list(range(1, n_layers + 1))
        check_layers(layers)


@pytest.mark.parametrize("shape", ["tiny", "tiny-ragged", "tiny-experts"])
def test_gradients_of_every_matrix(shape, tmp_path, lib):
    """Includes attention: the norms are 1 here. A rounding is part of a difference and bends it by e^2."""
    model = tmp_path / "model.gguf"
    synth_model.write_model("f32", model, shape, 2)
    layers = compare_layers(model)
    of_last = {name for name in read_tensors(model) if name.startswith("blk.1.") and not re.search("norm|exps|gate_inp", name)}
    assert layers[0]["of"].keys() == of_last | {"stream"}
    for name, (exact, difference, scale) in layers[0]["of"].items():
        assert abs(exact - difference) <= (NEAR if name == "stream" else 0.003) * scale > 0, name


def test_gradients_of_operations():
    """The residual stream of a layer hides the gradients of small terms; here each operation is alone."""
    done = subprocess.run([require_built(BUILD, "ggml-ext-backward"), "--operations"], check=True, capture_output=True, text=True, timeout=60)
    operations = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(operations) == 18
    for operation in operations:
        for exact, difference, scale in operation["of"]:
            assert abs(exact - difference) <= EXACT * scale > 0, operation["name"]


def test_gradients_of_transposed_operands():
    """Transposed operands give gradients that are not contiguous, which most operations need."""
    done = subprocess.run([require_built(BUILD, "ggml-ext-backward"), "--transposed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == [0, 4, 8, 2, 6, 10]


def test_memory_that_is_read_behind_a_product_is_written_again():
    """No edge of the graph orders the write to a cache before the read, so the input of the write is kept and the write repeated."""
    done = subprocess.run([require_built(BUILD, "ggml-ext-backward"), "--boundary"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["input", "middle"]


@pytest.mark.nightly
def test_gradients_of_all_architectures(tmp_path):
    known = 0
    for model in architectures.write_models("all", tmp_path):
        if any(name in model.stem for name in NOT_CUT):
            continue
        layers = compare_layers(model)
        if "refused" in layers[-1]:
            assert UNKNOWN[model.stem.rpartition("-")[0]] in layers[-1]["refused"], layers[-1]
            continue
        known += 1
        if "-moe" not in model.stem:  # another input may choose other experts
            check_layers(layers)
    assert known == 126


@pytest.mark.parametrize("architecture", UNKNOWN)
def test_operation_without_gradient_is_named(architecture, tmp_path):
    (model,) = architectures.write_models(architecture, tmp_path)
    assert UNKNOWN[architecture] in compare_layers(model)[-1]["refused"]


def label_uniforms(n: int) -> np.ndarray:
    """Return the first n uniform numbers that labels are drawn with."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def test_last_layer_matches_numpy(tmp_path, lib):
    """Computes norm, logits, drawn labels and the backward pass of the last layer in float64."""
    model, text, n_tokens = tmp_path / "model.gguf", tmp_path / "text.txt", 64
    synth_model.write_model("f32", model, "tiny", 2)
    text.write_bytes((ROOT / "data" / "heldout.txt").read_bytes()[:2000])
    weights = {name: t.data.astype(np.float64) for name, t in read_tensors(model).items()}
    out = weights.get("output.weight", weights["token_embd.weight"])
    command = [tool("ggml-ext-streams"), "-m", model, "-f", text, "-c", n_tokens, "-b", n_tokens, "-t", 2, "-ctk", "f32", "-ctv", "f32"]
    with LayerStreams(list(map(str, command)), tmp_path) as streams:
        assert streams.no_gradients == ""
        assert list(streams.begin_gradients(2)) == [0, 1]
        for chunk in range(streams.n_chunks):
            streams.compute_inputs(0, 3, chunk, True)
        streams.advance()
        streams.enter_layer(1)
        groups = streams.layers[1]
        (ffn,) = (i for i, g in enumerate(groups) if g.products[0].weight.endswith(("ffn_gate.weight", "ffn_up.weight")))
        (down,) = (i for i, g in enumerate(groups) if g.products[0].weight.endswith("ffn_down.weight"))
        for chunk in range(2):
            normed = streams.compute_inputs(1, ffn, chunk, False).x[0].astype(np.float64)
            arrays = streams.compute_inputs(1, down, chunk, False)
            middle, residual = arrays.x[0].astype(np.float64), arrays.residuals["blk.1.ffn_down.weight"][0].astype(np.float64)
            gradients = {name.split(".")[2]: g.astype(np.float64) for name, g in streams.gradients(1, chunk).items()}

            x = residual + middle @ weights["blk.1.ffn_down.weight"].T
            rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
            logits = (x / rms * weights["output_norm.weight"]) @ out.T
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            sums, u = p.cumsum(axis=1), label_uniforms(2 * n_tokens)[chunk * n_tokens :][:n_tokens, None]
            # float32 logits have an error of about 1e-6 of p: near a boundary either token may be drawn.
            sure = np.abs(sums - u).min(axis=1) > 1e-5
            assert sure.mean() > 0.8
            drawn = (sums <= u).sum(axis=1)
            p[np.arange(n_tokens), drawn] -= 1
            g = p @ out * weights["output_norm.weight"]
            g = (g - x / rms * (g * x / rms).mean(axis=1, keepdims=True)) / rms
            check_gradient(gradients["ffn_down"][sure], g[sure])

            gate, up = (normed @ weights[f"blk.1.ffn_{name}.weight"].T for name in ("gate", "up"))
            s, dh = 1 / (1 + np.exp(-gate)), g @ weights["blk.1.ffn_down.weight"]
            check_gradient(gradients["ffn_up"][sure], (dh * gate * s)[sure])
            check_gradient(gradients["ffn_gate"][sure], (dh * up * (s + gate * s * (1 - s)))[sure])


def check_gradient(actual: np.ndarray, expected: np.ndarray) -> None:
    """Allow the rounding of bfloat16 (2^-8), in which the streams keep gradients and inputs of layers."""
    assert np.abs(actual - expected).max() <= 2**-8 * np.abs(expected).max()
