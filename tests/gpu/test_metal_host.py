"""Upstream's Metal backend with its own kernels and those of metal/, compiled as host code (metal_host/), against exact references.

scripts/gpu/metal_check.py covers what needs Apple's compiler or a GPU. Kernels run in three thread orders, work between two barriers of a
command buffer runs in reverse, and buffers end or start at the limits of readable memory.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p

import gguf
import numpy as np
import pytest

import ggml_graph
from ggml_ext import TYPES
from helpers import native
from helpers.blocks import TYPE_NAMES, corner_blocks, dequantize_blocks, rotate_for, type_id
from helpers.metal_host import device
from helpers.native import F32, F32_U, I32

F16 = int(gguf.GGMLQuantizationType.F16)
UPSTREAM = ["q4_0", "q8_0", "q2_K", "q3_K", "q4_K", "q6_K", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq4_xs"]
HALF_U = 2.0**-11  # unit roundoff of half
ORDERS = (0, 1, 2)
GGML_PREC_F32 = 10


@pytest.fixture(autouse=True)
def defaults():
    configure()


def configure(order: int = 0, broken_barrier: int = 0, front: bool = False, library: bool = True, simdgroup_mm: bool = True) -> None:
    device().metal_host_set(c_int(order), c_int(broken_barrier), c_bool(front), c_bool(library), c_bool(simdgroup_mm))


class UnsupportedError(Exception):
    """supports_op returned false."""


class Graph(ggml_graph.Graph):
    """A graph on the Metal backend. Tensors have memory only while they are computed."""

    def __init__(self):
        base = ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
        super().__init__(base, native.kernels("native").dll)
        for name in ("ggml_permute", "ggml_dup", "ggml_cont"):
            getattr(base, name).restype = c_void_p
        base.ggml_free(self.ctx)
        self.ctx = c_void_p(base.ggml_init(self._InitParams(16 << 20, None, True)))
        self.leaves: list[tuple[c_void_p, np.ndarray]] = []

    def tensor(self, type_id: int, data: np.ndarray, shape: tuple[int, ...]) -> c_void_p:
        t = c_void_p(self.base.ggml_new_tensor(self.ctx, c_int(type_id), c_int(len(shape)), (c_int64 * len(shape))(*reversed(shape))))
        assert self.base.ggml_nbytes(t) == data.nbytes
        self.leaves.append((t, np.ascontiguousarray(data)))
        return t

    def run(self, graph: c_void_p, *nodes: c_void_p) -> None:
        """Compute nodes: all of them in order, including views."""
        leaves = (c_void_p * len(self.leaves))(*(t.value for t, _ in self.leaves))
        data = (c_void_p * len(self.leaves))(*(a.ctypes.data for _, a in self.leaves))
        if not device().metal_host_compute(leaves, data, c_int(len(leaves)), (c_void_p * len(nodes))(*(n.value for n in nodes)),
                                           c_int(len(nodes)), graph):
            raise UnsupportedError

    def read(self, node: c_void_p, shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, np.float32)
        assert self.base.ggml_nbytes(node) == out.nbytes
        device().metal_host_read(node, c_void_p(out.ctypes.data))
        return out

    def read_after(self, node: c_void_p, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """Read float32 from the memory after a result."""
        data = (ctypes.c_float * int(np.prod(shape))).from_address(self.base.ggml_get_data(node) + offset)
        return np.array(data, np.float32).reshape(shape)


def mul_mat(type_id: int, weights: np.ndarray, shape: tuple[int, ...], x: np.ndarray, ids: np.ndarray | None = None,
            precise: bool = False) -> np.ndarray:
    """Multiply weights, bytes of a logical shape (rows last), by x, float32 (..., columns, n).

    With ids (tokens, used), x is (tokens, 1 or used, n).
    """
    with Graph() as g:
        w, y = g.tensor(type_id, weights, shape), g.tensor(F32, x, x.shape)
        if ids is None:
            node = g.node("mul_mat", w, y)
            result = (*x.shape[:-1], shape[-2])
        else:
            node = g.node("mul_mat_id", w, y, g.tensor(I32, ids, ids.shape))
            result = (*ids.shape, shape[-2])
        if precise:
            assert g.base.ggml_prec_set_src(node, c_int(GGML_PREC_F32), c_int(1))
        g.run(g.plan(node), node)
        return g.read(node, result)


def run_in_all_orders(compute) -> np.ndarray:
    """Run compute() in three thread orders, which must give equal bits."""
    results = []
    for order in ORDERS:
        configure(order=order, front=order == 1)
        results.append(compute())
    configure()
    assert all(np.array_equal(r.view(np.uint32), results[0].view(np.uint32)) for r in results[1:]), "depends on the order of threads"
    return results[0]


# --- upstream's kernels, which validate the runtime


def upstream_rows(lib, name: str, n_rows: int, n: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return type id, bytes (n_rows, row bytes) and the float32 (n_rows, n) that ggml dequantizes."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    base = ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    base.ggml_row_size.restype = base.ggml_quantize_chunk.restype = c_size_t
    w = np.random.default_rng(1).standard_normal((n_rows, n)).astype(np.float32)
    rows = np.empty((n_rows, base.ggml_row_size(c_int(kind), c_int64(n))), np.uint8)
    imatrix = np.ones(n, np.float32)
    base.ggml_quantize_chunk(c_int(kind), c_void_p(w.ctypes.data), c_void_p(rows.ctypes.data), c_int64(0), c_int64(n_rows), c_int64(n),
                             c_void_p(imatrix.ctypes.data))
    return int(kind), rows, lib.dequantize(int(kind), rows, n)


@pytest.mark.parametrize("n_columns", [1, 13])
@pytest.mark.parametrize("name", UPSTREAM)
def test_upstreams_kernels_match_the_reference(lib, name, n_columns):
    """mul_mv multiplies in float, with partial sums several times the terms' magnitude (minima, offsets).

    mul_mm first rounds weights and activations to half.
    """
    n_rows, n = 40, 1024
    kind, rows, w = upstream_rows(lib, name, n_rows, n)
    x = np.random.default_rng(2).standard_normal((n_columns, n)).astype(np.float32)
    actual = run_in_all_orders(lambda: mul_mat(kind, rows, (n_rows, n), x))
    exact, magnitude = x.astype(np.float64) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T
    assert (np.abs(actual - exact) <= (2.1 * HALF_U if n_columns > 8 else 4 * n / 32 * F32_U) * magnitude).all()


# --- our kernels


def row_lengths(name: str, *of_64: int) -> list[int]:
    """Return row lengths: 768, for blocks of 64 some that end inside 256 weights, and for blocks of 32 half a block of 64 before these."""
    return [768, *({256: (), 64: of_64, 32: [n - 32 for n in of_64]}[TYPES[name].block_size])]


def types_and_lengths(*of_64: int) -> list[tuple[str, int]]:
    return [(name, n) for name in TYPE_NAMES for n in row_lengths(name, *of_64)]


def dequantize_rotated(lib, name: str, blocks: np.ndarray) -> np.ndarray:
    """Dequantize as products do, without the inverse rotation: float32 scale times code minus offset."""
    flat = np.ascontiguousarray(blocks).reshape(-1, TYPES[name].block_bytes)
    scale, value, _ = native.unpack_reference(lib, name, flat)
    return (scale.astype(np.float32) * value.astype(np.float32)).reshape(*blocks.shape[:-2], -1)


def assert_product(lib, name: str, actual: np.ndarray, weights: np.ndarray, x: np.ndarray, in_halves: bool) -> None:
    """Compare products with float64.

    Args:
        actual: (..., columns, rows).
        weights: float32 (..., rows, n) of dequantize_rotated().
        x: float32 (..., columns, n).
        in_halves: the kernel is mul_mm, except for rows below 64. Its products of halves are exact in float; n of them are added.

    mul_mv rounds a term 17 times: the code minus a zero point, its product, eight additions in a lane's block, the scale and its product,
    and five additions over the lanes; further an addition per 256 weights. Each is at most u = 2^-24 of the sum of magnitudes.
    """
    n, y = x.shape[-1], rotate_for(lib, name, x)
    if in_halves and n >= 64:
        weights, y, n_roundings = weights.astype(np.float16), y.astype(np.float16), n
    else:
        n_roundings = 17 + (n + 255) // 256
    w, y = weights.astype(np.float64), y.astype(np.float64)
    exact, magnitude = y @ w.swapaxes(-1, -2), np.abs(y) @ np.abs(w).swapaxes(-1, -2)
    wrong = np.argwhere(~(np.abs(actual - exact) <= n_roundings * F32_U * magnitude))
    assert not wrong.size, f"{name}: {len(wrong)} of {actual.size} wrong, the first at {wrong[0]}"


@pytest.mark.parametrize("name, n", types_and_lengths(64, 576, 1344))
def test_get_rows_is_bit_equal(lib, name, n):
    """A batch of two with separate indices: dequantization of all byte values, and the inverse rotation."""
    n = 2048 if n == 768 else n  # several threadgroups per row
    info = TYPES[name]
    corners = corner_blocks(lib, name)
    blocks = np.concatenate([corners, native.random_blocks(lib, name, (4, n), 1).reshape(-1, info.block_bytes)])
    n_rows = 2 * (len(blocks) // (2 * (n // info.block_size)))
    rows = blocks[: n_rows * (n // info.block_size)].reshape(2, n_rows // 2, -1, info.block_bytes)
    ids = np.random.default_rng(2).integers(0, n_rows // 2, (2, 9)).astype(np.int32)

    def compute():
        with Graph() as g:
            node = g.node("get_rows", g.tensor(type_id(name), rows, (2, n_rows // 2, n)), g.tensor(I32, ids, ids.shape))
            g.run(g.plan(node), node)
            return g.read(node, (2, 9, n))

    expected = np.stack([dequantize_blocks(lib, name, rows[i][ids[i]]) for i in range(2)])
    actual = run_in_all_orders(compute)
    wrong = np.argwhere((actual.view(np.uint32) != expected.view(np.uint32)) & ~((actual == 0) & (expected == 0)))
    assert not wrong.size, f"{name}: {len(wrong)} of {actual.size} differ, the first at {wrong[0]}"


@pytest.mark.parametrize("name, n", [(name, n) for name, n in types_and_lengths(64, 576, 1344) if TYPES[name].rotated])
def test_rotation_is_bit_equal(lib, name, n):
    """Strided activations, rotated into the memory after the result, in the order of the codes."""
    buffer = np.random.default_rng(3).standard_normal((2, 3, 5, n)).astype(np.float32)
    x = buffer.transpose(1, 2, 0, 3)
    with Graph() as g:
        view = g.node("permute", g.tensor(F32, buffer, buffer.shape), *map(c_int, (0, 2, 3, 1)))
        node = g.node("mul_mat", g.tensor(type_id(name), native.random_blocks(lib, name, (7, n), 4), (7, n)), view)
        g.run(g.plan(node), view, node)
        actual = g.read_after(node, (7 * x[..., 0].size * 4 + 31) // 32 * 32, x.shape)
    # lane by lane: the eight values of byte c of a block's planes follow one another
    expected = np.swapaxes(rotate_for(lib, name, x).reshape(*x.shape[:-1], -1, 8, TYPES[name].block_size // 8), -1, -2)
    assert np.array_equal(actual.view(np.uint32), expected.reshape(x.shape).view(np.uint32))


# rows around those of a simdgroup (4) and of a threadgroup (8 or 16); columns around passes of four and the switch to mul_mm
@pytest.mark.parametrize("name, n", types_and_lengths(64, 832))
def test_products_of_few_columns(lib, name, n):
    for n_rows, n_columns in ((1, 1), (5, 2), (17, 3), (33, 4), (7, 5), (9, 6), (16, 7), (12, 8)):
        blocks = native.random_blocks(lib, name, (n_rows, n), n_rows)
        x = np.random.default_rng(n_columns).standard_normal((n_columns, n)).astype(np.float32)
        actual = run_in_all_orders(lambda: mul_mat(type_id(name), blocks, (n_rows, n), x))
        assert_product(lib, name, actual, dequantize_rotated(lib, name, blocks), x, in_halves=False)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_products_without_simdgroup_matrices(lib, name):
    """Older GPUs use mul_mv for any number of columns."""
    n_rows, n = 10, 256
    blocks = native.random_blocks(lib, name, (n_rows, n), 5)
    x = np.random.default_rng(6).standard_normal((33, n)).astype(np.float32)
    configure(simdgroup_mm=False)
    assert_product(lib, name, mul_mat(type_id(name), blocks, (n_rows, n), x), dequantize_rotated(lib, name, blocks), x, in_halves=False)


@pytest.mark.parametrize("name, n", types_and_lengths(64, 832))
def test_products_of_many_columns(lib, name, n):
    """Shapes around tiles of 64 rows and 32 columns."""
    for n_rows, n_columns in ((64, 32), (70, 9), (5, 33)):
        blocks = native.random_blocks(lib, name, (n_rows, n), n_rows)
        x = np.random.default_rng(n_columns).standard_normal((n_columns, n)).astype(np.float32)
        actual = run_in_all_orders(lambda: mul_mat(type_id(name), blocks, (n_rows, n), x))
        assert_product(lib, name, actual, dequantize_rotated(lib, name, blocks), x, in_halves=True)


@pytest.mark.parametrize("n_columns", [2, 9])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_products_of_batches(lib, name, n_columns):
    """Weights broadcast over dimensions 2 and 3 of the activations, two and three batches each."""
    n_rows, n = 6, 256
    blocks = native.random_blocks(lib, name, (2, 2, n_rows, n), 7)
    x = np.random.default_rng(8).standard_normal((6, 4, n_columns, n)).astype(np.float32)
    actual = mul_mat(type_id(name), blocks, (2, 2, n_rows, n), x)
    weights = np.repeat(np.repeat(dequantize_rotated(lib, name, blocks), 3, axis=0), 2, axis=1)
    assert_product(lib, name, actual, weights, x, in_halves=n_columns > 8)


@pytest.mark.parametrize("n_columns", [1, 17])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_extreme_scales(lib, name, n_columns):
    """Zero, subnormal, negative and largest scales, one block per row. Beyond the range of half, mul_mm gives Inf or NaN, as upstream's do."""
    rows = corner_blocks(lib, name)[:, None]
    x = np.random.default_rng(9).standard_normal((n_columns, TYPES[name].block_size)).astype(np.float32)
    actual = mul_mat(type_id(name), rows, (len(rows), x.shape[1]), x)
    weights = dequantize_rotated(lib, name, rows)
    if n_columns > 8:
        fits = (np.abs(weights) < 65000).all(-1)
        assert fits.sum() > 150
        actual, weights = actual[:, fits], weights[fits]
    assert_product(lib, name, actual, weights, x, in_halves=n_columns > 8)


def make_experts_case(lib, name: str, n: int, n_tokens: int, shared: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks (4 experts, 20 rows, blocks, bytes), activations (tokens, 1 or 2, n), ids (tokens, 2)."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((n_tokens, 1 if shared else 2, n)).astype(np.float32)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(n_tokens)]).astype(np.int32)
    return native.random_blocks(lib, name, (4, 20, n), 11), x, ids


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_products_of_experts(lib, name, n_tokens, shared):
    """mul_mv_id, and from 32 tokens on upstream's sorted mul_mm_id."""
    n = {256: 512, 64: 320, 32: 288}[TYPES[name].block_size]
    blocks, x, ids = make_experts_case(lib, name, n, n_tokens, shared)
    actual = run_in_all_orders(lambda: mul_mat(type_id(name), blocks, (4, 20, n), x, ids))
    weights = dequantize_rotated(lib, name, blocks)[ids]  # (tokens, used, rows, n)
    columns = np.broadcast_to(x, (n_tokens, 2, n))[:, :, None]
    assert_product(lib, name, actual[:, :, None], weights, columns, in_halves=n_tokens >= 32)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_experts_scale_large_rotated_activations(lib, name):
    """With GGML_PREC_F32 upstream scales activations by a power of two of their largest magnitude, here the rotated one.

    Each value alone fits in a half, a rotated block does not.
    """
    block = TYPES[name].block_size
    n = max(64, block)
    blocks, x, ids = make_experts_case(lib, name, n, 40, True)
    signs = np.sign(lib.rotate_back(np.eye(block, dtype=np.float32)[:1]))[0] if TYPES[name].rotated else np.ones(block, np.float32)
    x[0, 0, :block] = 60000 * signs  # rotated: 60000 sqrt(block) in one place
    actual = mul_mat(type_id(name), blocks, (4, 20, n), x, ids, precise=True)
    y = rotate_for(lib, name, x)
    scale = 2.0 ** max(0, np.ceil(np.log2(np.abs(y).max())) - 15)
    weights = dequantize_rotated(lib, name, blocks).astype(np.float16).astype(np.float64)[ids]
    halves = (y / np.float32(scale)).astype(np.float16).astype(np.float64) * scale
    exact = np.einsum("tun,turn->tur", np.broadcast_to(halves, (40, 2, n)), weights)
    magnitude = np.einsum("tun,turn->tur", np.broadcast_to(np.abs(halves), (40, 2, n)), np.abs(weights))
    assert np.isfinite(actual).all() and scale > 1
    assert (np.abs(actual - exact) <= n * F32_U * magnitude).all()


# --- what the host code reports about our types


def supports(name: str, op: str, x_type: int = F32, n_used: int = 2, permuted: bool = False) -> bool:
    """Return whether the backend supports ggml_<op> with weights of a type, rows of 256."""
    n, info = 256, TYPES[name]

    def weights(g: Graph, *rows: int) -> c_void_p:
        return g.tensor(type_id(name), np.zeros((*rows, n // info.block_size, info.block_bytes), np.uint8), (*rows, n))

    def values(g: Graph, kind: int, *shape: int) -> c_void_p:
        return g.tensor(kind, np.zeros(shape, {F32: np.float32, F16: np.float16, I32: np.int32}[kind]), shape)

    with Graph() as g:
        if op == "get_rows":
            node = g.node(op, weights(g, 8), values(g, I32, 3))
        elif op == "mul_mat_id":
            node = g.node(op, weights(g, 4, 8), values(g, x_type, 3, 1, n), values(g, I32, 3, n_used))
        elif op == "mul_mat":
            x = values(g, x_type, n, n)
            node = g.node(op, weights(g, 8), g.node("permute", x, *map(c_int, (1, 0, 2, 3))) if permuted else x)
        else:
            node = g.node(op, weights(g, 8))
        return device().metal_host_supports(node)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_supported_operations_have_kernels(name):
    for op in ("get_rows", "mul_mat", "mul_mat_id"):
        configure()
        assert supports(name, op), op
        configure(library=False)  # as if it did not compile
        assert not supports(name, op), op
    configure()
    assert not supports(name, "mul_mat", F16) and not supports(name, "mul_mat_id", F16)
    assert not supports(name, "mul_mat", permuted=True)
    assert not supports(name, "dup") and not supports(name, "cont")
    sorted_by = {int(n) for n in re.findall(r"^kernel_mul_mm_id_map0_ne20_(\d+)$", device().metal_host_kernels(False).decode(), re.M)}
    assert len(sorted_by) > 5
    assert {n for n in range(1, 5) if supports(name, "mul_mat_id", n_used=n)} == sorted_by & set(range(1, 5))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_allocation_holds_rotated_activations(name):
    """It follows the result and upstream's own data of mul_mat_id."""
    n, n_rows, info = 768, 10, TYPES[name]
    row = np.zeros((n // info.block_size, info.block_bytes), np.uint8)
    with Graph() as g:
        w = g.tensor(type_id(name), np.stack([row] * n_rows), (n_rows, n))
        product = g.node("mul_mat", w, g.tensor(F32, np.zeros((3, n), np.float32), (3, n)))
        experts = g.tensor(type_id(name), np.stack([np.stack([row] * n_rows)] * 4), (4, n_rows, n))
        x = g.tensor(F32, np.zeros((5, 2, n), np.float32), (5, 2, n))
        expert_product = g.node("mul_mat_id", experts, x, g.tensor(I32, np.zeros((5, 2), np.int32), (5, 2)))
        for node, n_bytes, n_values in ((product, 4 * 3 * n_rows, 3 * n), (expert_product, 4 * 5 * 2 * n_rows + 4 * 4 + 4 * 4 * 5 + 8 + 4 * 256, 10 * n)):
            buffer = (n_bytes + 31) // 32 * 32 + 4 * n_values
            assert device().metal_host_alloc_size(node) == (buffer if info.rotated else n_bytes)


# --- the runtime detects errors


@pytest.mark.parametrize("name, n_columns", [("itq3_t", 1), ("itq2_t64", 1), ("itq3_s", 33)])
def test_missing_barriers_are_detected(lib, name, n_columns):
    """Without any one of its barriers a product is wrong or depends on the thread order."""
    n_rows, n = 70, 512
    blocks = native.random_blocks(lib, name, (n_rows, n), 12)
    x = np.random.default_rng(13).standard_normal((n_columns, n)).astype(np.float32)
    lines = (c_int * 16)()
    device().metal_host_barriers(lines, c_int(16))
    expected = mul_mat(type_id(name), blocks, (n_rows, n), x)
    n_barriers = device().metal_host_barriers(lines, c_int(16))
    assert n_barriers == (4 if n_columns > 8 else 1)
    for line in list(lines)[:n_barriers]:
        changed = False
        for order in ORDERS:
            configure(order=order, broken_barrier=line)
            changed = changed or not np.array_equal(mul_mat(type_id(name), blocks, (n_rows, n), x), expected)
        assert changed, f"line {line}"


def test_every_kernel_is_used():
    """The tests above make the backend request each kernel by name."""
    ours = {k for k in device().metal_host_kernels(False).decode().split()
            if k.startswith("kernel_ext_") or any(re.search(rf"_{name}(_f32|$)", k) for name in TYPE_NAMES)}
    assert len(ours) == 3 + 8 * len(TYPE_NAMES)
    assert ours <= set(device().metal_host_kernels(True).decode().split())
