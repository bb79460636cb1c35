"""Calibration of the layers that predict further tokens (MTP): llama-imatrix --mtp-layers, ggml-ext-streams and ggml-ext quantize."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest

from ggml_ext._base.console import Console
from ggml_ext._calibration import by_layer
from ggml_ext._native.graph import read_uses
from ggml_ext._native.streams import LayerStreams
from ggml_ext._sequential.sums import Sums
from helpers import architectures
from helpers.commands import quantize, tool
from helpers.models import read_tensors
from helpers.mtp import append_mtp_layers, read_weights, start_mtp_layer, write_with_mtp_layers
from helpers.streams import SAME

CONTEXT, N_CHUNKS, N = 128, 3, 8  # N: layers of the reference model
FIRST = f"blk.{N}.nextn.eh_proj.weight"
TOLERANCE = 0.01  # of Hessians, relative to the largest value: the hidden states of two programs differ by products in half precision
# Graphs with hidden states before and behind the norm, experts, compressed keys and linear attention.
ARCHITECTURES = ("cohere2moe", "deepseek2", "hy_v3", "qwen35", "qwen3next")


@pytest.fixture(scope="module")
def predictor(tmp_path_factory, model):
    """The reference model with two MTP layers of random weights."""
    weights, random = read_weights(gguf.GGUFReader(model)), np.random.default_rng(1)
    layers = [start_mtp_layer(weights, copied) for copied in (N - 1, N - 2)]
    for layer in layers:
        for name in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm"):
            layer[name] = layer[name] * random.uniform(0.5, 1.5, layer[name].shape).astype(np.float32)
    return write_with_mtp_layers(model, tmp_path_factory.mktemp("mtp") / "m.gguf", layers)


def run_llama_imatrix(model, text, out, *options, batch=CONTEXT) -> None:
    command = [tool("llama-imatrix"), "-m", model, "-f", text, "-c", CONTEXT, "-b", batch, "-t", 2, "--chunks", N_CHUNKS, "--mtp-layers", "-o", out]
    subprocess.run([*map(str, [*command, *options])], check=True, capture_output=True, timeout=300)


def start_streams(model, text, folder, *, only_original=False) -> LayerStreams:
    command = by_layer.list_command(model, text, n_context=CONTEXT, n_chunks=N_CHUNKS, n_threads=2, mtp_layers=True)
    return LayerStreams(command, folder, only_original=only_original)


def normalize(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)


def expected_inputs(model, text, folder) -> np.ndarray:
    """Compute the inputs of the first MTP matrix by its definition: the norms of each token's embedding and of the hidden state before it."""
    tensors = {name: t.data for name, t in read_tensors(model).items()}
    command = [tool("llama-tokenize"), "-m", model, "-f", text, "--ids", "--log-disable"]
    vocabulary = subprocess.run(command, check=True, capture_output=True, text=True)
    tokens = np.array(json.loads(vocabulary.stdout))[: N_CHUNKS * CONTEXT].reshape(N_CHUNKS, CONTEXT)
    tokens[:, 0] = gguf.GGUFReader(model).fields["tokenizer.ggml.bos_token_id"].contents()  # as llama-imatrix begins its chunks
    rows = []
    with start_streams(model, text, folder) as streams:
        for k in range(N + 1):
            streams.enter_layer(k)
            for chunk in range(N_CHUNKS):
                if k == N:  # the output matrix multiplies the normalized hidden states
                    hidden = streams.compute_inputs(k, 0, chunk, False).x[0] / tensors["output_norm.weight"]
                    before = np.concatenate([np.zeros((1, hidden.shape[1])), hidden[:-1]])
                    embeddings = normalize(tensors["token_embd.weight"][tokens[chunk]].astype(np.float64))
                    norms = [tensors[f"blk.{N}.nextn.{name}.weight"] for name in ("enorm", "hnorm")]
                    rows.append(np.concatenate([embeddings * norms[0], before * norms[1]], axis=1))
            if k < N:
                streams.advance()
    return np.concatenate(rows)


@pytest.mark.parametrize("batch", [CONTEXT, CONTEXT // 2, 3 * CONTEXT])
def test_hessian_is_that_of_tokens_and_hidden_states_before_them(predictor, text, batch, tmp_path):
    """Also if a chunk takes two batches, or a batch has three chunks. Some products have inputs in half precision."""
    x = expected_inputs(predictor, text, tmp_path)
    run_llama_imatrix(predictor, text, tmp_path / "i.gguf", "--moments", "full", batch=batch)
    tensors, rows = read_tensors(tmp_path / "i.gguf"), np.tril_indices(x.shape[1])
    expected, actual = (x.T @ x)[rows], tensors[f"{FIRST}.in_moments"].data.ravel()
    assert tensors[f"{FIRST}.moment_counts"].data.ravel() == [len(x)]
    assert np.abs(actual - expected).max() <= TOLERANCE * expected.max()
    shifted = np.concatenate([x[:, :256], np.roll(x[:, 256:], -1, axis=0)], axis=1)  # of the hidden state at the token itself
    assert np.abs((shifted.T @ shifted)[rows] - expected).max() > 5 * TOLERANCE * expected.max()


def check_streams(model, text, folder) -> None:
    """Check that all inputs of MTP layers equal those of llama-imatrix, and that two streams of one model agree."""
    run_llama_imatrix(model, text, folder / "i.gguf")
    expected = {n.removesuffix(".in_sum2"): t.data.reshape(-1, t.shape[0]) for n, t in read_tensors(folder / "i.gguf").items() if n.endswith(".in_sum2")}
    n_compared = 0
    with start_streams(model, text, folder) as streams, ThreadPoolExecutor(2) as pool:
        for k, groups in enumerate(streams.all_layers):
            streams.enter_layer(k)
            for g, group in enumerate(groups if k >= len(streams.layers) else ()):
                sums = Sums(group, pool)
                for chunk in range(N_CHUNKS):
                    sums.add(streams.compute_inputs(k, g, chunk, False))
                sums.flush()
                assert not sums.d.any()
                for product in group.products:
                    n_compared += 1
                    squares = np.einsum("eii->ei", sums.h)
                    assert np.abs(squares - expected[product.weight]).max() <= SAME * expected[product.weight].max(), product.weight
            if streams.has_output(k):
                assert streams.advance() == 0
        first = min(int(name.split(".")[1]) for gs in streams.mtp_layers for g in gs for name in [g.products[0].weight])
    matrices = [name for name in expected if name.startswith("blk.") and int(name.split(".")[1]) >= first]
    assert n_compared == len(matrices) >= 6


def test_streams_of_two_layers_equal_llama_imatrix(predictor, text, tmp_path, float32_sums):
    check_streams(predictor, text, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streams_of_other_architectures_equal_llama_imatrix(architecture, letters, tmp_path, float32_sums):
    for path in architectures.write_models(architecture, tmp_path):
        check_streams(append_mtp_layers(path, tmp_path / "mtp.gguf"), letters, tmp_path)


def test_layer_by_layer_equals_llama_imatrix(predictor, text, tmp_path, float32_sums):
    command = by_layer.list_command(predictor, text, n_context=CONTEXT, n_chunks=N_CHUNKS, n_threads=2, mtp_layers=True)
    by_layer.collect_by_layer(command, tmp_path / "ours.gguf", lambda n: "block", n_threads=2, title="layers", console=Console())
    run_llama_imatrix(predictor, text, tmp_path / "theirs.gguf", "--moments", "block")
    actual, expected = (read_tensors(tmp_path / name) for name in ("ours.gguf", "theirs.gguf"))
    assert actual.keys() == expected.keys() and f"{FIRST}.in_moments" in actual
    for name, t in expected.items():
        assert np.abs(actual[name].data - t.data).max() <= SAME * np.abs(t.data).max(), name


@pytest.mark.parametrize(("options", "expected"), [
    ((), "itq2_t"), (("--no-propagate",), "itq2_t"), (("--no-calibration",), "q5_k"),
    (("--target-bpw", 3, "--target-types", "itq2_t,q8_0", "--no-propagate", "--no-target-check", "--sensitivity", "usual"), "q5_k"),
], ids=("sequential", "calibrated", "without", "target"))
def test_layers_have_the_type_if_they_are_calibrated(predictor, options, expected, tmp_path):
    kind = () if "--target-bpw" in options else ("--type", "itq2_t")
    chunks = () if "--no-calibration" in options else ("--calibration-chunks", 2)
    quantize(predictor, tmp_path / "out.gguf", *kind, *options, *chunks)
    types = [t.tensor_type.name.lower() for name, t in read_tensors(tmp_path / "out.gguf").items()
             if name.startswith((f"blk.{N}.", f"blk.{N + 1}.")) and "norm" not in name]
    assert types == 12 * [expected]


def test_sequential_quantization_sees_the_quantized_model(predictor, text, tmp_path):
    """Matrices of MTP layers depend on the types of the layers before: their inputs come from the quantized model."""
    for name in ("itq2_t", "q8_0"):
        main = [f"blk.{i}.={name}" for i in range(N)]
        rules = [option for rule in main for option in ("--tensor-type", rule)]
        quantize(predictor, tmp_path / f"{name}.gguf", "--type", "itq3_t", *rules, "--imatrix-from", text, "--calibration-chunks", 2, "--propagate")
    one, other = (read_tensors(tmp_path / f"{name}.gguf") for name in ("itq2_t", "q8_0"))
    assert not np.array_equal(one[FIRST].data, other[FIRST].data)


def test_graph_that_ends_the_program_is_not_run(letters, tmp_path):
    """The MTP layer of GLM-4.5V has multimodal RoPE without sections."""
    (path,) = architectures.write_models("glm4moe", tmp_path)
    assert read_uses([append_mtp_layers(path, tmp_path / "mtp.gguf")], of_mtp_layers=True) is None


def test_model_without_such_layers_is_unchanged(model, text, tmp_path):
    run_llama_imatrix(model, text, tmp_path / "i.gguf")
    assert not any(f"blk.{N}." in name for name in read_tensors(tmp_path / "i.gguf"))
    assert read_uses([model], of_mtp_layers=True) is None
