"""Products on an interpreted device (tests/ptx): operands, activations as the kernels quantized them, exact results and bounds."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_size_t, pointer
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES, WEIGHT_TYPES
from helpers.blocks import rotate_for
from helpers.cuda_host import BLOCK_MMQ, BLOCK_Q8, HAS_MINIMUM, code_positions
from helpers.native import BUILD, F32, F32_U, I32, random_blocks, unpack_reference
from helpers.type_kinds import TYPE_KINDS
from ptx.compiled import ARCHITECTURES, MAIN, NIGHTLY_TYPES
from ptx.device import Device, FinishedLaunch, Fusion, Tensor, plain_name

FOLDER = Path(os.environ.get("GGML_EXT_TEST_PTX", BUILD.parent / "ptx"))
STOCK_SCALES = {"q3_K": (108,), "q4_K": (0, 2), "iq3_s": (0,), "iq2_xxs": (0,)}  # offsets of the half scales in a block
BLOCK_Q8_1 = np.dtype([("d", "<f2"), ("sum", "<f2"), ("qs", "i1", 32)])
KEEPS_HALVES = {*HAS_MINIMUM, "q4_K"}  # types whose tiles have minima, and whose activations have sums, as halves
# MMQ reads full tiles, including rows and columns that do not exist; their results are discarded (test_uninitialized_memory_does_not_reach_the_results).
ALLOWED_PROBLEMS = {("mul_mat_q", "reads bytes that nobody wrote")}
HALF_U = 2.0**-11
LARGEST_STOCK_SCALE = 0.002
N_SM = 3  # multiprocessors: tiles are split and their parts added


def read_units() -> dict[str, dict]:
    path = FOLDER / "units.json"
    if not path.exists():
        pytest.skip("no kernels to interpret: run scripts/build/build_tests.py --package build/package --only ptx, which needs nvcc")
    return json.loads(path.read_text())


@functools.cache
def find_unit(name: str, architecture: str) -> str:
    """Return the first unit with a type's kernels for an architecture."""
    unit = next((unit for unit, what in read_units().items() if name in what["types"] and architecture in what["architectures"]), None)
    if unit is None:
        pytest.skip(f"no kernels of {name} are compiled for sm_{architecture}: run make nightly with CUDA toolkit 12.8 or later")
    return unit


def type_architecture_params(names: Sequence[str] = tuple(sorted(WEIGHT_TYPES)), architectures: Sequence[str] = ARCHITECTURES) -> list:
    """Return parameters (name, architecture); those that only tests/ptx/build.py --nightly compiles are marked nightly."""
    return [pytest.param(name, a, id=f"{name}-sm_{a}",
                         marks=() if name in TYPE_KINDS or (a == MAIN and name not in NIGHTLY_TYPES) else pytest.mark.nightly)
            for name in names for a in architectures]


def row_length(name: str, k: int = 512) -> int:
    """Return a row length above k, a multiple of 256: one more block, so that rows of shorter blocks end inside 256 weights."""
    return k + (TYPES[name].block_size if name in WEIGHT_TYPES else 256)


@dataclass
class Weights:
    """Encoded weights and what a product multiplies.

    blocks: uint8 (experts, rows, blocks, bytes).
    product: float64 (experts, rows, columns), the weights in the domain of the activations (rotated).
    magnitude: |d scale| (|q| + |offset|), the bound of the terms that a kernel rounds.
    """
    name: str
    blocks: np.ndarray
    product: np.ndarray
    magnitude: np.ndarray

    @property
    def block_size(self) -> int:
        return WEIGHT_TYPES[self.name].block_size if self.name in WEIGHT_TYPES else 256

    @property
    def n_columns(self) -> int:
        return self.product.shape[-1]

    @property
    def type_id(self) -> int:
        return int(TYPES[self.name].id if self.name in TYPES else gguf.GGMLQuantizationType[self.name.upper()])


@functools.cache
def random_weights(lib, name: str, n_rows: int, n_columns: int, n_experts: int = 1) -> Weights:
    if name in WEIGHT_TYPES:
        blocks = random_blocks(lib, name, (n_experts, n_rows, n_columns), n_rows)
        s, v, magnitude = unpack_reference(lib, name, blocks.reshape(-1, blocks.shape[-1]))
        return Weights(name, blocks, (s * v).reshape(n_experts, n_rows, -1), (np.abs(s) * magnitude).reshape(n_experts, n_rows, -1))
    n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][1]
    rng = np.random.default_rng(n_rows)
    blocks = rng.integers(0, 256, (n_experts, n_rows, n_columns // 256, n_bytes), np.uint8)
    for offset in STOCK_SCALES[name]:
        blocks[..., offset:offset + 2] = (LARGEST_STOCK_SCALE * rng.uniform(0.5, 0.99, blocks.shape[:3])).astype(np.float16)[..., None].view(np.uint8)
    values = gguf.quants.dequantize(blocks.reshape(n_experts, n_rows, -1), gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    block_values = np.abs(values).reshape(n_experts, n_rows, -1, 256)
    return Weights(name, blocks, values, (block_values + 2 * block_values.max(-1, keepdims=True)).reshape(values.shape))


class ProductRunner:
    """Runs products on a device. A weight buffer is padded with noise to a multiple of four bytes."""

    def __init__(self, name: str, architecture: str, unit: str | None = None, **options):
        self.device = Device(architecture, FOLDER, unit or find_unit(name, architecture), N_SM, **options)

    def tensor(self, type_id: int, ne: tuple[int, ...], data: np.ndarray | None, block: tuple[int, int] = (1, 4)) -> Tensor:
        ne = (*ne, *(1,) * (4 - len(ne)))
        nb = [block[1], block[1] * ne[0] // block[0]]
        nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
        size = nb[3] * ne[3]
        address = self.device.allocate(size) if data is None else self.device.buffer(data, padding=-data.nbytes % 4)
        return Tensor(type_id, (c_int64 * 4)(*ne), (c_size_t * 4)(*nb), address)

    def weights(self, w: Weights, padded: bool = False) -> Tensor:
        """padded: allocate as upstream does, with zeros up to a multiple of 512 weights in the last row."""
        n_experts, n_rows, _, n_bytes = w.blocks.shape
        rest = np.zeros(-w.n_columns % 512 // w.block_size * n_bytes * padded, np.uint8)
        return self.tensor(w.type_id, (w.n_columns, n_rows, n_experts), np.concatenate([w.blocks.reshape(-1), rest]), (w.block_size, n_bytes))

    def floats(self, x: np.ndarray) -> Tensor:
        return self.tensor(F32, x.shape[::-1], x)

    def multiply_vectors(self, w: Weights, x: np.ndarray, ids: np.ndarray | None = None, fusion: dict | None = None) -> np.ndarray:
        """Multiply with MMVQ: float32 (columns, rows), or with ids (tokens, used, rows)."""
        fused = None
        if fusion is not None:
            tensors = {key: self.weights(value) if key == "gate" else self.floats(value) for key, value in fusion.items() if key != "glu"}
            fused = Fusion(glu_op=fusion["glu"], **{key: pointer(value) for key, value in tensors.items()})
        return self.product("ptx_mul_mat_vec", self.weights(w), x, ids, None if fused is None else byref(fused))

    def multiply_tiles(self, w: Weights, x: np.ndarray, n_columns: int, ids: np.ndarray | None = None) -> np.ndarray:
        """Multiply with MMQ in tiles of n_columns; same shapes as multiply_vectors."""
        padded = w.n_columns % 256 != 0  # the kernel reads blocks past a row's last one and multiplies them by zeros (cuda/mmq.cuh)
        return self.product("ptx_mul_mat", self.weights(w, padded), x, ids, c_int(n_columns))

    def product(self, function: str, w: Tensor, x: np.ndarray, ids: np.ndarray | None, option) -> np.ndarray:
        y = self.tensor(F32, (w.ne[1], *(x.shape[:1] if ids is None else ids.shape[::-1])), None)
        chosen = None if ids is None else byref(self.tensor(I32, ids.shape[::-1], ids))
        self.device.call(function, byref(w), byref(self.floats(x)), chosen, byref(y), option)
        results = self.device.memory.read(y.data, np.float32, tuple(y.ne)[::-1])
        return results[0, 0] if ids is None else results[0]

    # --- activations as the kernels wrote them

    def find_launch(self, part: str) -> FinishedLaunch:
        return next(launch for launch in self.device.launches if part in plain_name(launch.name))

    def activations(self, w: Weights, n: int) -> Activations:
        """Return the first `n` rows that the quantizer of MMVQ or MMQ wrote."""
        launch = self.find_launch("quantize")
        width = (w.n_columns + 511) // 512 * 512
        name, address = plain_name(launch.name), launch.parameters[2 if "mmq" in launch.name else 1]
        read = {"quantize_q8": self.read_q8, "quantize_q8_1": self.read_q8_1}.get(name, self.read_mmq)
        values, steps, sums = read(w, address, n, width)
        return Activations(values[:, :w.n_columns], steps[:, :w.n_columns], sums[:, :(w.n_columns + 31) // 32])

    def read_q8(self, w: Weights, address: int, n: int, width: int):
        dtype, per_block = BLOCK_Q8[w.block_size], w.block_size // 32
        y = self.device.memory.read(address, dtype, (n, width // 32 * 36 // dtype.itemsize))
        d = (y["sum_d"]["d"].astype(np.uint32) << 16).view(np.float32).astype(np.float64)[..., None]
        in_order = lambda values: values.reshape(n, -1, per_block, 8, 4).swapaxes(2, 3).reshape(n, -1)  # noqa: E731
        return in_order(y["qs"][..., code_positions(w.name)] * d), in_order(np.broadcast_to(d, y["qs"].shape)), np.zeros((n, width // 32))

    def read_q8_1(self, w: Weights, address: int, n: int, width: int):
        y = self.device.memory.read(address, BLOCK_Q8_1, (n, width // 32))
        d = y["d"].astype(np.float64)[..., None]
        return (y["qs"] * d).reshape(n, -1), np.broadcast_to(d, y["qs"].shape).reshape(n, -1), y["sum"].astype(np.float64)

    def read_mmq(self, w: Weights, address: int, n: int, width: int):
        y = self.device.memory.read(address, BLOCK_MMQ, (width // 128, n))
        halves = w.name in KEEPS_HALVES
        ds = y["ds"].copy().view(np.float16).reshape(*y.shape, 4, 2).astype(np.float64)
        d = (ds[..., 0] if halves else y["ds"].copy().view(np.float32).astype(np.float64))[..., None]
        q = y["qs"].reshape(*y.shape, 4, 32)
        flat = lambda a: a.swapaxes(0, 1).reshape(n, -1)  # noqa: E731
        return flat(q * d), flat(np.broadcast_to(d, q.shape)), flat(ds[..., 1] if halves else np.zeros(q.shape[:-1]))


@dataclass
class Activations:
    """float64 (rows, columns): values d*q and steps d; sums of 32 values (rows, columns/32), if the format stores them."""
    values: np.ndarray
    steps: np.ndarray
    sums: np.ndarray

    def check(self, lib, name: str, x: np.ndarray) -> None:
        """Assert that they are the inputs, rotated if the type is, within half a step.

        The division by 127 and the reciprocal may err in the last bit, the rotation by sixteen roundings of parts of the largest value.
        Upstream's types keep the scale as half, rounded after the codes were computed with it.
    """
        exact = rotate_for(lib, name, x) if name in WEIGHT_TYPES else x
        tolerance = 0.5 + 128 * 20 * F32_U + (0 if name in WEIGHT_TYPES else 127 * HALF_U)
        assert (np.abs(self.values - exact) <= self.steps * tolerance + 1e-30).all()

    def rows(self, index) -> Activations:
        return Activations(self.values[index], self.steps[index], self.sums[index])


def expected_product(w: Weights, expert: int, y: Activations) -> tuple[np.ndarray, np.ndarray]:
    """Return the product with the activations as they are and the error bound of a float kernel, float64 (columns, rows) each.

    A thread's sum of products is an exact integer. Converting it, two scales and the offset take at most six roundings of parts of
    M = sum of magnitude |y|. Accumulation takes at most one per 32 weights, and eight for warps and lanes.
    """
    n_roundings = 6 + w.n_columns // 32 + 8
    bound = n_roundings * F32_U * (np.abs(y.values) @ w.magnitude[expert].T)
    if w.name == "iq2_xxs":  # upstream divides integers by 2 and by 4 per 32 weights, which loses less than one scale each
        bound += 1.25 * LARGEST_STOCK_SCALE * y.steps[:, ::32].sum(1, keepdims=True)
    return y.values @ w.product[expert].T, bound


def expected_tiled_product(w: Weights, expert: int, y: Activations) -> tuple[np.ndarray, np.ndarray]:
    """Return the same for MMQ, whose tiles may keep a minimum as half and whose activations may keep a sum as half.

    Both are rounded. Upstream's sum (Q4_K) is that of the values before quantization.
    """
    expected, bound = expected_product(w, expert, y)
    if w.name not in KEEPS_HALVES:
        return expected, bound
    groups = lambda a: a.reshape(*a.shape[:-1], -1, 32)  # noqa: E731
    code_sums = groups(y.values).sum(-1)
    tolerance = np.abs(y.sums - code_sums) + 2 * HALF_U * np.abs(code_sums)
    bound = bound + tolerance @ groups(w.magnitude[expert]).max(-1).T
    if w.name == "q4_K":
        bound += HALF_U * np.abs(y.values) @ np.abs(w.product[expert]).T
    return expected, bound


@functools.cache
def random_inputs(n: int, n_columns: int, seed: int = 5) -> np.ndarray:
    x = np.random.default_rng(seed + n).standard_normal((n, n_columns)).astype(np.float32)
    x[0, ::7] *= 100  # outliers
    return x
