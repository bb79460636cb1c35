"""Matrix products with F16 activations: --act-prec f16, ggml_prec_set_src(node, GGML_PREC_F16, 1)."""

from __future__ import annotations

import os
import re
import subprocess
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers import native
from helpers.commands import quantize, tool
from helpers.models import ROOT
from helpers.native import F32, F32_U, I32
from helpers.rpc import rpc_server
from perplexity_run import UNIFORM, run_tool

GGML_PREC_F16, GGML_PREC_Q8 = 20, 30
# One type for each activation type, and Q6_K and Q8_0, the types of output matrices.
UPSTREAM = ["q4_0", "q4_1", "q8_0", "iq4_nl", "q3_k", "q4_k", "q6_k", "iq3_s"]
TYPE_NAMES = [*sorted(WEIGHT_TYPES), *UPSTREAM]
SUM_IN_HALF = {"q4_1"}


def type_id(name: str) -> int:
    return int(TYPES[name].id if name in TYPES else gguf.GGMLQuantizationType[name.upper()])


def activation_block(name: str) -> int:
    """Return how many activations share a scale. Blocks of 64 and 32 share it in groups of 256."""
    return 32 if name in ("q4_0", "q4_1", "q8_0", "iq4_nl") else 256


def encode_weights(lib, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Encode Gaussian weights and return the bytes."""
    w = np.random.default_rng(seed).standard_normal((int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
    return lib.quantize(type_id(name), w, imatrix=np.ones(shape[-1], np.float32) if name.startswith("iq") else None)


def activations(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw rows of different magnitudes with some large channels. Larger or smaller ones overflow the half scale or sum of a block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 1, (*shape[:-1], 1)) * np.where(rng.random(shape[-1]) < 0.01, 30, 1)
    return x.astype(np.float32)


def compute_product(op: str, tensors: list[tuple[int, np.ndarray, tuple[int, ...]]], shape: tuple[int, ...], prec: int | None,
            n_threads: int = 2) -> np.ndarray:
    with native.Graph(256 << 20) as g:
        node = g.node(op, *(g.tensor(*t) for t in tensors))
        if prec is not None:
            g.base.ggml_prec_set_src.restype = c_bool
            assert g.base.ggml_prec_set_src(node, c_int(prec), c_int(1))
        g.run(g.plan(node), n_threads)
        return g.read(node, shape)


def rotate_rows(lib, name: str, rows: np.ndarray) -> np.ndarray:
    """Rotate rows as the type's products do and return them as float64."""
    if name in TYPES and TYPES[name].activation != "q8_k":
        size = TYPES[name].block_size
        return lib.rotate(rows.astype(np.float32).reshape(-1, size)).reshape(rows.shape).astype(np.float64)
    return rows.astype(np.float64)


def reference(lib, name: str, data: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute exact products of the decoded weights (n_rows, n) with x (n_cols, n), and the error bounds for F16 and 8-bit activations.

    Let a be the largest magnitude of a block of x after the rotation, and d = a/127 the step of 8 bits. With float scales the error
    is at most d/2 = a/254. The residual's step is d/254, its error at most a/64516 = 1.55e-5 a, or 8.9e-6 a as a uniform RMS error.
    A half scale has a relative error up to 2^-11, which 127 steps multiply: the error is at most (1/2 + 127*2^-11) d = 0.562 d,
    and with the residual 0.562^2 a/127^2 = 1.96e-5 a. Q4_1 multiplies its minimum by the half sum of a block's activations:
    2^-11 |minimum| |sum|.

    Float roundings of the kernels are at most (n/32 + 30) u of the sum of magnitudes, for both products. A rotation has 8 stages
    of additions with an error of u each, so 8 u |x|_2 per value; y is rotated forth and back, x once: 24 u |x|_2.
    """
    decoded = lib.dequantize(type_id(name), data, x.shape[-1]).astype(np.float64)
    w, x_rotated = np.abs(rotate_rows(lib, name, decoded)), rotate_rows(lib, name, x)
    size = activation_block(name)
    padded = np.pad(x_rotated, ((0, 0), (0, -x_rotated.shape[1] % size)))
    blocks = padded.reshape(len(x_rotated), -1, size)
    spread = lambda a: np.repeat(a, size, axis=1)[:, : x_rotated.shape[1]]  # noqa: E731
    largest, norm = spread(np.abs(blocks).max(-1)), spread(np.sqrt((blocks**2).sum(-1)))
    step = largest / 127
    deviation = 0.5 + 127 * 2.0**-11 if size == 32 else 0.5
    floats = (x.shape[-1] / 32 + 30) * F32_U * (np.abs(x_rotated) + largest / 127) @ w.T + 24 * F32_U * norm @ w.T
    bound16, bound8 = (deviation**2 * step / 127) @ w.T, (deviation * step) @ w.T
    if name in SUM_IN_HALF:
        halves = np.ascontiguousarray(data.reshape(len(decoded), -1, 20)[..., 2:4]).view(np.float16)
        minimum = np.abs(halves[..., 0].astype(np.float64))
        sums = np.abs(blocks.sum(-1)) + size * deviation * step[:, ::size]
        bound16, bound8 = (b + 1.01 * 2.0**-11 * sums @ minimum.T for b in (bound16, bound8))
    return x.astype(np.float64) @ decoded.T, bound16 + floats, bound8 + floats


def assert_precise(actual: np.ndarray, q8: np.ndarray, exact: np.ndarray, bound: np.ndarray, label: str) -> None:
    """Check the bound of each value, and that the RMS error is at least 150 times below that of 8 bits.

    The residual's step is 254 times finer. The ratio of 37 products scatters by 1/6; 150 allows two and a half times that.
    """
    error = np.abs(actual - exact)
    assert (error <= bound).all(), f"{label}: {np.max(error / bound):.2f} times the bound"
    size = np.sqrt((exact**2).mean(1, keepdims=True))
    ratio = np.sqrt(((q8 - exact) / size).var() / ((actual - exact) / size).var())
    assert ratio > 150 or any(name in label for name in SUM_IN_HALF), f"{label}: only {ratio:.0f} times as exact as 8 bits"


@pytest.mark.parametrize("n_cols", [1, 3, 9, 64])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_mul_mat(lib, name, n_cols):
    n = {256: 256 * 7, 64: 64 * 27, 32: 32 * 53}[TYPES[name].block_size if name in TYPES else 256]
    data, x = encode_weights(lib, name, (37, n), n_cols), activations((n_cols, n), n_cols + 1)
    tensors = [(type_id(name), data, (37, n)), (F32, x, x.shape)]
    q8, marked_q8, f16 = (compute_product("mul_mat", tensors, (n_cols, 37), prec) for prec in (None, GGML_PREC_Q8, GGML_PREC_F16))
    assert q8.tobytes() == marked_q8.tobytes()
    exact, bound16, bound8 = reference(lib, name, data, x)
    assert (np.abs(q8 - exact) <= bound8).all()
    assert_precise(f16, q8, exact, bound16, f"{name}, {n_cols} columns")


@pytest.mark.parametrize("n_tokens", [1, 3, 9, 64])
@pytest.mark.parametrize("name", [*sorted(WEIGHT_TYPES), "q8_0", "q4_k"])
def test_mul_mat_id(lib, name, n_tokens):
    """Experts with no token, one and many, and inputs that a token's experts share (gate, up) or do not share (down)."""
    n_expert, n_used, n_rows, n = 5, 2, 37, 512
    rng = np.random.default_rng(n_tokens)
    experts = encode_weights(lib, name, (n_expert, n_rows, n), n_tokens).reshape(n_expert, n_rows, -1)
    ids = np.stack([rng.permutation([0, 1, 2, 4])[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    for n_inputs in (1, n_used):
        x = activations((n_tokens, n_inputs, n), n_tokens + 1)
        tensors = [(type_id(name), experts, (n_expert, n_rows, n)), (F32, x, x.shape), (I32, ids, ids.shape)]
        q8, f16 = (compute_product("mul_mat_id", tensors, (n_tokens, n_used, n_rows), prec) for prec in (None, GGML_PREC_F16))
        for expert in range(n_expert):
            token, slot = np.nonzero(ids == expert)
            if len(token):
                exact, bound, _ = reference(lib, name, experts[expert], x[token, slot % n_inputs])
                assert_precise(f16[token, slot], q8[token, slot], exact, bound, f"{name}, expert {expert}")


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("op, n_rows, n_cols", [("mul_mat", 1 << 15, 129), ("mul_mat_id", 1 << 15, 129)])
@pytest.mark.parametrize("name", ["q8_0", "itq3_t64"])
def test_large_result_is_computed_in_parts(lib, name, op, n_rows, n_cols, n_threads):
    """More than 2^22 results, so that the work buffer holds a part of them, with a shorter last part (cpu/act-prec.cpp)."""
    assert n_rows * n_cols > 1 << 22
    data = np.tile(encode_weights(lib, name, (64, 256), 1), (n_rows // 64, 1))
    x = activations((n_cols, 256), 2)
    tensors = [(type_id(name), data, (n_rows, 256)), (F32, x, x.shape)]
    if op == "mul_mat_id":
        ids = np.zeros((n_cols, 1), np.int32)
        tensors = [(type_id(name), data, (1, n_rows, 256)), (F32, x, (n_cols, 1, 256)), (I32, ids, ids.shape)]
    shape = (n_cols, n_rows) if op == "mul_mat" else (n_cols, 1, n_rows)
    q8, f16 = (compute_product(op, tensors, shape, prec, n_threads).reshape(n_cols, -1, 64) for prec in (None, GGML_PREC_F16))
    exact, bound, _ = reference(lib, name, data[:64], x)
    assert (np.abs(f16 - exact[:, None]) <= bound[:, None]).all()
    assert_precise(f16[:, -1], q8[:, -1], exact, bound, op)


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t64", "q8_0"])
def test_broadcast_over_strided_activations(lib, name):
    """Two weight matrices are broadcast to four activation matrices, which are a view with gaps between the rows."""
    n_rows, n, n_cols = 37, 512, 5
    rows = encode_weights(lib, name, (2, n_rows, n), 3).reshape(2, n_rows, -1)
    x = activations((4, n_cols, 2 * n), 4)
    with native.Graph() as g:
        padded = g.tensor(F32, x, x.shape)
        g.base.ggml_view_3d.restype = c_void_p
        strides = [c_size_t(8 * n), c_size_t(8 * n * n_cols)]
        view = c_void_p(g.base.ggml_view_3d(g.ctx, padded, c_int64(n), c_int64(n_cols), c_int64(4), *strides, c_size_t(4 * n)))
        node = g.node("mul_mat", g.tensor(type_id(name), rows, (2, n_rows, n)), view)
        g.base.ggml_prec_set_src(node, c_int(GGML_PREC_F16), c_int(1))
        g.run(g.plan(node))
        actual = g.read(node, (4, n_cols, n_rows))
    for i in range(4):
        exact, bound, _ = reference(lib, name, rows[i // 2], np.ascontiguousarray(x[i, :, n:]))
        assert (np.abs(actual[i] - exact) <= bound).all()


def test_small_activations_keep_their_precision(lib):
    """Half scales are subnormal here, and the residual's scale would be zero without the factor 128 (ggml-ext-act-prec.h)."""
    data, x = encode_weights(lib, "q8_0", (37, 512), 5), activations((3, 512), 6) * np.float32(1e-4)
    tensors = [(type_id("q8_0"), data, (37, 512)), (F32, x, x.shape)]
    exact = x.astype(np.float64) @ lib.dequantize(type_id("q8_0"), data, 512).astype(np.float64).T
    q8, f16 = (np.abs(compute_product("mul_mat", tensors, (3, 37), prec) - exact).max() for prec in (None, GGML_PREC_F16))
    assert f16 < q8 / 80


def test_float_weights_ignore_precision(lib):
    w, x = activations((5, 64), 7), activations((3, 64), 8)
    tensors = [(F32, w, w.shape), (F32, x, x.shape)]
    assert compute_product("mul_mat", tensors, (3, 5), GGML_PREC_F16).tobytes() == compute_product("mul_mat", tensors, (3, 5), None).tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["itq3_s", "itq3_t64"])
def test_non_finite_activation_spoils_only_its_column(lib, name, value):
    """The same holds for 8 bits, except for CCQ2, DITTO3 and upstream types: upstream's quantization of activations loses the value."""
    data, x = encode_weights(lib, name, (37, 512), 9), activations((3, 512), 10)
    x[1, 300] = value
    actual = compute_product("mul_mat", [(type_id(name), data, (37, 512)), (F32, x, x.shape)], (3, 37), GGML_PREC_F16)
    assert np.isnan(actual[1]).all() and np.isfinite(actual[[0, 2]]).all()


@pytest.fixture(scope="module")
def files(tmp_path_factory, model):
    """Write the reference model in ITQ3_S, and the same weights in F32, which has no rounding of activations."""
    directory = tmp_path_factory.mktemp("models")
    quantize(model, directory / "itq3_s.gguf", "--type", "itq3_s", *UNIFORM)
    run_tool("llama-quantize", "--allow-requantize", directory / "itq3_s.gguf", directory / "f32.gguf", "F32")
    return directory


def perplexities(file, *flags) -> np.ndarray:
    """Return the running perplexity after each of four chunks."""
    text = ROOT / "data" / "heldout.txt"
    log = run_tool("llama-perplexity", "-m", file, "-f", text, "-c", 256, "--chunks", 4, "-t", 1, *flags)
    return np.array([float(x) for x in re.findall(r"\[\d+\]([\d.]+),", log)])


def test_perplexity_equals_that_of_float_activations(files):
    """The tolerance is the printed precision, 0.0001; 8 bits change 0.004 (docs/reference/act-prec.md)."""
    exact, q8, f16 = (perplexities(files / name, *flags) for name, flags in
                      [("f32.gguf", []), ("itq3_s.gguf", ["--act-prec", "q8"]), ("itq3_s.gguf", ["--act-prec", "f16"])])
    assert len(exact) == 4 and np.array_equal(q8, perplexities(files / "itq3_s.gguf"))
    assert np.abs(f16 - exact).max() <= 0.00021 and np.abs(q8 - exact).max() > 0.001


def test_environment_sets_precision_of_programs_without_the_flag(files):
    """Runs llama-bench; test_llama_cpp_python.py reads the precision of a context."""
    for value, code in ("q8", 0), ("f16", 0), ("q9", 1):
        done = subprocess.run([tool("llama-bench"), "-m", files / "itq3_s.gguf", "-p", "8", "-n", "0", "-r", "1"], capture_output=True, text=True,
                              env={**os.environ, "LLAMA_ARG_ACT_PREC": value}, timeout=60)
        assert done.returncode == code
    assert "error: --act-prec q9: unknown precision; use q8 or f16" in done.stderr


@pytest.mark.parametrize("program", ["llama-cli", "llama-server", "llama-completion", "llama-perplexity"])
def test_unknown_precision_is_refused(program, tmp_path):
    done = subprocess.run([tool(program), "-m", tmp_path / "none.gguf", "--act-prec", "q9"], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    assert errors == ["error: --act-prec q9: unknown precision; use q8 or f16"]
    done = subprocess.run([tool(program), "-m", tmp_path / "none.gguf"], env={**os.environ, "LLAMA_ARG_ACT_PREC": "q9"},
                          capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1 and "--act-prec q9: unknown precision" in done.stderr


def test_device_limited_to_8_bits_is_refused(files, tmp_path):
    """The device is refused even if it holds no layer."""
    with rpc_server(tmp_path) as endpoint:
        for layers in (0, 99):
            command = [tool("llama-completion"), "-m", files / "itq3_s.gguf", "--rpc", endpoint, "-ngl", str(layers),
                       "-p", "a", "-n", "2", "-no-cnv", "--act-prec", "f16"]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
            assert done.returncode == 1
            assert "--act-prec f16: RPC0: the RPC backend supports only 8-bit activations; use --device none" in done.stderr
