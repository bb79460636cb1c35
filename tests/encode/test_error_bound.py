"""Ditto's error bound (section 3.2.4, equation 1) as a property, and epsilon in the metadata."""

import subprocess

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ggml_ext._encode.accuracy import NAMES_KEY, VALUES_KEY, Accuracy, read_epsilons
from ggml_ext._encode.codec import Codec
from ggml_ext._encode.tensor_calibration import TensorCalibration
from ggml_ext._formats import gguf_file
from ggml_ext.quants import ditto3
from helpers.commands import quantize, run_quantize, tool
from helpers.errors import check_error
from helpers.importances import DOWN, UP
from helpers.models import gaussian, read_tensors, write_gguf
from helpers.native import F32, Graph

DITTO3 = gguf.GGMLQuantizationType.DITTO3


@st.composite
def matrices(draw) -> np.ndarray:
    """Draw float32 (n_rows, n): Gaussian, heavy-tailed, constant, sparse, with outliers, tiny, large or arbitrary."""
    shape = draw(st.integers(1, 4)), 256 * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "student_t", "constant", "sparse", "outliers", "free"]))
    if kind == "free":
        values = hnp.arrays(np.float32, 256, elements=st.floats(-65504, 65504, width=32))
        return np.tile(draw(values), (shape[0], shape[1] // 256))
    w = rng.standard_t(2, shape) if kind == "student_t" else rng.standard_normal(shape)
    if kind == "constant":
        w[:] = w[0, 0]
    elif kind == "sparse":
        w *= rng.random(shape) < 0.05
    elif kind == "outliers":
        w[rng.random(shape) < 0.01] *= 1e4
    return np.clip(w * 10.0 ** draw(st.integers(-42, 4)), -65504, 65504).astype(np.float32)


@st.composite
def inputs(draw, n: int) -> np.ndarray:
    """Draw float64 (n,): Gaussian, one column, or signs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "one", "signs"]))
    if kind == "one":
        return np.eye(n)[rng.integers(n)]
    x = rng.standard_normal(n) * 10.0 ** draw(st.integers(-6, 6))
    return np.sign(x) if kind == "signs" else x


def encode(codec: Codec, w: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, Accuracy]:
    """Return blocks and accuracy as the quantizer computes them."""
    tensor = gguf_file.Tensor("w", w.shape[::-1], gguf.GGMLQuantizationType.F32, 0, w.nbytes)
    calibration = TensorCalibration(importance)
    if codec.needs_codebook(tensor, DITTO3):
        calibration = TensorCalibration(importance, codec.codebook([(0, w)], tensor, calibration))
    return codec.convert(w.view(np.uint8), tensor, 0, DITTO3, calibration)


@pytest.mark.parametrize("codebook", ["block", "tensor"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_outputs_stay_within_the_bound(lib, codebook, data):
    """|W x - W' x|_inf <= epsilon |x|_1 for drawn inputs x and for the worst ones."""
    w = data.draw(matrices())
    n = w.shape[1]
    importance = np.random.default_rng(n).lognormal(0, 2, (1, n)).astype(np.float32) if data.draw(st.booleans()) else None
    blocks, accuracy = encode(Codec(lib, ditto_codebook=codebook), w, importance)
    epsilon = float(accuracy.epsilon)
    stored = ditto3.dequantize_blocks(blocks.reshape(-1, 106)).reshape(w.shape).astype(np.float64)
    difference = w.astype(np.float64) - stored
    assert np.isfinite(stored).all() and np.abs(difference).max() <= epsilon
    # float64 sums round n products and additions, each at most max |w| |x|
    row, column = np.unravel_index(np.abs(difference).argmax(), w.shape)
    for x in (data.draw(inputs(n)), np.eye(n)[column], np.sign(difference[row])):
        rounding = 2 * n * 2.0**-53 * (np.abs(w).astype(np.float64) + np.abs(stored)).dot(np.abs(x)).max()
        assert np.abs(w.astype(np.float64) @ x - stored @ x).max() <= epsilon * np.abs(x).sum() + rounding
    # epsilon is tight: two float32 steps less would not hold
    if epsilon:
        below = np.nextafter(np.nextafter(accuracy.epsilon, np.float32(0)), np.float32(0))
        assert np.abs(difference).max() > below


@pytest.mark.parametrize("codebook", ["block", "tensor"])
@pytest.mark.parametrize("seed", range(4))
def test_ggmls_products_stay_within_the_bound(lib, codebook, seed):
    """ggml first rounds the input to Q8_K, x'. Then |y - y'| <= epsilon |x|_1 + |W'(x - x')| + float32 roundings."""
    rng = np.random.default_rng(seed)
    w, x = rng.standard_t(4, (24, 768)).astype(np.float32), rng.standard_normal((3, 768)).astype(np.float32)
    blocks, accuracy = encode(Codec(lib, ditto_codebook=codebook), w, None)
    with Graph() as graph:
        weights = graph.tensor(int(DITTO3), blocks, w.shape)
        actual = graph.compute("mul_mat", weights, graph.tensor(F32, x, x.shape), shape=(3, 24)).astype(np.float64)
    w, x = w.astype(np.float64), x.astype(np.float64)
    stored = np.abs(ditto3.dequantize_blocks(blocks.reshape(-1, 106)).reshape(w.shape).astype(np.float64))
    # Q8_K rounds to the nearest of 127 steps up to a block's largest value; its scale is a float32
    step = np.repeat(np.abs(x).reshape(3, -1, 256).max(axis=2) / 127, 256, axis=1)
    slack = 0.51 * step @ stored.T + 64 * 2.0**-24 * np.abs(x) @ stored.T
    bound = float(accuracy.epsilon) * np.abs(x).sum(axis=1, keepdims=True)
    assert (np.abs(actual - x @ w.T) <= bound + slack).all()
    assert (slack < bound).all()  # a larger slack would hide a wrong epsilon


@pytest.mark.parametrize("value", [0, 1e-45, 1.0, 1 + 2.0**-24, 0.1, 65504.0, 3e38])
def test_epsilon_is_rounded_up(value):
    assert float(Accuracy(value).epsilon) >= value
    assert float(Accuracy(value).epsilon) <= value * (1 + 2.0**-22) + 2.0**-148


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tensors = {UP: gaussian(40, 512), "blk.0.attn_q.weight": gaussian(8, 320), DOWN: gaussian(24, 256, seed=2), "blk.0.attn_norm.weight": gaussian(256)}
    return write_gguf(tmp_path_factory.mktemp("source") / "in.gguf", tensors, "F32")


@pytest.mark.parametrize("codebook", ["block", "tensor"])
def test_metadata_has_the_largest_error(lib, source, tmp_path, codebook):
    """gguf alone reads an epsilon for every DITTO3 tensor, equal to the error in the file."""
    out = tmp_path / "out.gguf"
    result = quantize(source, out, "--type", "ditto3", "--ditto-codebook", codebook)
    fields = gguf.GGUFReader(out).fields
    epsilons = dict(zip(fields[NAMES_KEY].contents(), fields[VALUES_KEY].contents(), strict=True))
    assert list(epsilons) == [UP, DOWN]
    originals, stored = read_tensors(source), read_tensors(out)
    for name, epsilon in epsilons.items():
        largest_error = np.abs(gguf.quants.dequantize(stored[name].data, DITTO3).astype(np.float64) - originals[name].data).max()
        assert largest_error <= epsilon <= largest_error * (1 + 2.0**-22), name
        assert f"{epsilon:.6g}" in result.stdout
    quantize(source, tmp_path / "numpy.gguf", "--type", "ditto3", "--ditto-codebook", codebook, "--encoder", "numpy",
             "--tensor-type", "attn_q=f16")
    assert read_epsilons(gguf_file.GGUFFile(tmp_path / "numpy.gguf")) == epsilons


def test_no_epsilon_without_ditto3(source, tmp_path):
    quantize(source, tmp_path / "out.gguf", "--type", "itq3_s", "--tensor-type", "attn_q=f16")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert NAMES_KEY not in fields and VALUES_KEY not in fields


def test_epsilon_follows_the_tensor(lib, source, tmp_path):
    """A DITTO3 tensor is copied with its epsilon; a tensor that changes its type loses it."""
    quantize(source, tmp_path / "first.gguf", "--type", "ditto3")
    first = read_epsilons(gguf_file.GGUFFile(tmp_path / "first.gguf"))
    requantize = ["--allow-requantize", "--tensor-type", "ffn_down=itq3_s", "--tensor-type", "attn_q=f16"]
    quantize(tmp_path / "first.gguf", tmp_path / "second.gguf", "--type", "ditto3", *requantize)
    assert read_epsilons(gguf_file.GGUFFile(tmp_path / "second.gguf")) == {UP: first[UP]}
    quantize(tmp_path / "second.gguf", tmp_path / "third.gguf", "--type", "itq3_s", *requantize)
    assert read_epsilons(gguf_file.GGUFFile(tmp_path / "third.gguf")) == {}


def test_llama_quantize_copies_the_keys(model, lib, tmp_path):
    """llama-quantize loads and copies all metadata."""
    quantize(model, tmp_path / "out.gguf", "--type", "ditto3", "--pure")
    subprocess.run([tool("llama-quantize"), "--allow-requantize", tmp_path / "out.gguf", tmp_path / "copy.gguf", "COPY"],
                   check=True, capture_output=True)
    copied = read_epsilons(gguf_file.GGUFFile(tmp_path / "copy.gguf"))
    assert copied == read_epsilons(gguf_file.GGUFFile(tmp_path / "out.gguf")) and len(copied) == 57


@pytest.mark.parametrize("values", [np.float32([1.0]), None, "text"], ids=["length", "missing", "type"])
def test_damaged_epsilon_keys_are_reported(tmp_path, values):
    def fill(writer):
        writer.add_array(NAMES_KEY, [UP, DOWN])
        if values is not None:
            writer.add_array(VALUES_KEY, [float(v) for v in values] if not isinstance(values, str) else ["a", "b"])

    source = write_gguf(tmp_path / "in.gguf", {UP: gaussian(8, 256)}, fill=fill)
    result = run_quantize(source, tmp_path / "out.gguf", "--type", "ditto3")
    check_error(result, "in.gguf", NAMES_KEY, "same length", "quantize the model again")
    assert not (tmp_path / "out.gguf").exists()
