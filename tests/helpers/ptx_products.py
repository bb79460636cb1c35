"""Products on an interpreted device (tests/ptx): operands, the activations as its kernels have quantised them, exact results and bounds."""

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
from helpers.cuda_host import BLOCK_MMQ, BLOCK_Q8, HAS_MINIMUM, code_places, rotated
from helpers.native import BUILD, F32, F32_U, I32, blocks_of, unpacked
from helpers.type_kinds import TYPE_KINDS
from ptx.compiled import ARCHITECTURES, MAIN
from ptx.device import Device, Done, Fusion, Tensor, plain_name

FOLDER = Path(os.environ.get("GGML_EXT_TEST_PTX", BUILD.parent / "ptx"))
STOCK_SCALES = {"q3_K": (108,), "q4_K": (0, 2), "iq3_s": (0,), "iq2_xxs": (0,)}  # bytes where halves of a block are
BLOCK_Q8_1 = np.dtype([("d", "<f2"), ("sum", "<f2"), ("qs", "i1", 32)])
KEEPS_HALVES = {*HAS_MINIMUM, "q4_K"}  # tiles with minima, and activations with sums
# MMQ reads tiles whole, of columns and rows that are not there too: what comes of it is not kept (test_noise).
BY_DESIGN = {("mul_mat_q", "reads bytes that nobody wrote")}
HALF_U = 2.0**-11
LARGEST_STOCK_SCALE = 0.002
N_SM = 3  # multiprocessors: tiles are cut and have to be put together again


def units() -> dict[str, dict]:
    path = FOLDER / "units.json"
    if not path.exists():
        pytest.skip("the kernels to interpret are not compiled: scripts/build/build_tests.py --package build/package --only ptx, which needs nvcc")
    return json.loads(path.read_text())


@functools.cache
def unit_of(name: str, architecture: str) -> str:
    """The first unit with that type's kernels for that architecture."""
    found = next((unit for unit, what in units().items() if name in what["types"] and architecture in what["architectures"]), None)
    if found is None:
        pytest.skip(f"no kernels of {name} are compiled for sm_{architecture}: make nightly does it, with CUDA toolkit 12.8 or later")
    return found


def everywhere(names: Sequence[str] = tuple(sorted(WEIGHT_TYPES)), architectures: Sequence[str] = ARCHITECTURES) -> list:
    """Parameters name and architecture. By night alone: what tests/ptx/build.py compiles by night alone."""
    return [pytest.param(name, a, id=f"{name}-sm_{a}", marks=() if a == MAIN or name in TYPE_KINDS else pytest.mark.nightly)
            for name in names for a in architectures]


def columns_of(name: str, long: bool = False) -> int:
    """Of rows: with 4096 and more MMVQ has another kernel. Those of 64 end inside 256 weights."""
    ragged = name in WEIGHT_TYPES and TYPES[name].block_size == 64
    return (4160 if ragged else 4096) if long else 576 if ragged else 768


@dataclass
class Weights:
    """blocks: uint8 (experts, rows, blocks, bytes). product and magnitude: float64 (experts, rows, columns), the weights as the activations
    of their type want them (rotated), and |d scale| (|q| + |offset|), of which a kernel's roundings are parts."""
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
def weights(lib, name: str, n_rows: int, n_columns: int, n_experts: int = 1) -> Weights:
    if name in WEIGHT_TYPES:
        blocks = blocks_of(lib, name, (n_experts, n_rows, n_columns), n_rows)
        s, v, magnitude = unpacked(lib, name, blocks.reshape(-1, blocks.shape[-1]))
        return Weights(name, blocks, (s * v).reshape(n_experts, n_rows, -1), (np.abs(s) * magnitude).reshape(n_experts, n_rows, -1))
    n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][1]
    rng = np.random.default_rng(n_rows)
    blocks = rng.integers(0, 256, (n_experts, n_rows, n_columns // 256, n_bytes), np.uint8)
    for at in STOCK_SCALES[name]:
        blocks[..., at:at + 2] = (LARGEST_STOCK_SCALE * rng.uniform(0.5, 0.99, blocks.shape[:3])).astype(np.float16)[..., None].view(np.uint8)
    values = gguf.quants.dequantize(blocks.reshape(n_experts, n_rows, -1), gguf.GGMLQuantizationType[name.upper()]).astype(np.float64)
    of_blocks = np.abs(values).reshape(n_experts, n_rows, -1, 256)
    return Weights(name, blocks, values, (of_blocks + 2 * of_blocks.max(-1, keepdims=True)).reshape(values.shape))


class Bench:
    """A device and operands on it. Buffers of weights end with the last word that holds a byte of them, and noise is in its rest."""

    def __init__(self, name: str, architecture: str, unit: str | None = None, **options):
        self.device = Device(architecture, FOLDER, unit or unit_of(name, architecture), N_SM, **options)

    def tensor(self, type_id: int, ne: tuple[int, ...], data: np.ndarray | None, block: tuple[int, int] = (1, 4)) -> Tensor:
        ne = (*ne, *(1,) * (4 - len(ne)))
        nb = [block[1], block[1] * ne[0] // block[0]]
        nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
        size = nb[3] * ne[3]
        address = self.device.room(size) if data is None else self.device.buffer(data, behind=-data.nbytes % 4)
        return Tensor(type_id, (c_int64 * 4)(*ne), (c_size_t * 4)(*nb), address)

    def weights(self, w: Weights, padded: bool = False) -> Tensor:
        """padded: as upstream allocates tensors, as if the last row went on to a multiple of 512 weights, with zeros."""
        n_experts, n_rows, _, n_bytes = w.blocks.shape
        rest = np.zeros(-w.n_columns % 512 // w.block_size * n_bytes * padded, np.uint8)
        return self.tensor(w.type_id, (w.n_columns, n_rows, n_experts), np.concatenate([w.blocks.reshape(-1), rest]), (w.block_size, n_bytes))

    def floats(self, x: np.ndarray) -> Tensor:
        return self.tensor(F32, x.shape[::-1], x)

    def vectors(self, w: Weights, x: np.ndarray, ids: np.ndarray | None = None, fusion: dict | None = None) -> np.ndarray:
        """MMVQ: float32 (columns, rows), or with ids (tokens, used, rows)."""
        fused = None
        if fusion is not None:
            tensors = {key: self.weights(value) if key == "gate" else self.floats(value) for key, value in fusion.items() if key != "glu"}
            fused = Fusion(glu_op=fusion["glu"], **{key: pointer(value) for key, value in tensors.items()})
        return self.product("ptx_mul_mat_vec", self.weights(w), x, ids, None if fused is None else byref(fused))

    def tiles(self, w: Weights, x: np.ndarray, n_columns: int, ids: np.ndarray | None = None) -> np.ndarray:
        """MMQ with tiles of that many columns: the same shapes."""
        padded = w.n_columns % 256 != 0  # blocks behind a row's last one are read, and their activations are zero (cuda/mmq.cuh)
        return self.product("ptx_mul_mat", self.weights(w, padded), x, ids, c_int(n_columns))

    def product(self, function: str, w: Tensor, x: np.ndarray, ids: np.ndarray | None, option) -> np.ndarray:
        y = self.tensor(F32, (w.ne[1], *(x.shape[:1] if ids is None else ids.shape[::-1])), None)
        chosen = None if ids is None else byref(self.tensor(I32, ids.shape[::-1], ids))
        self.device.call(function, byref(w), byref(self.floats(x)), chosen, byref(y), option)
        results = self.device.memory.read(y.data, np.float32, tuple(y.ne)[::-1])
        return results[0, 0] if ids is None else results[0]

    # --- activations as the kernels left them

    def launched(self, part: str) -> Done:
        return next(done for done in self.device.launches if part in plain_name(done.name))

    def activations(self, w: Weights, n: int) -> Activations:
        """Those of the first `n` rows that the quantizer of MMVQ or MMQ wrote."""
        done = self.launched("quantize")
        width = (w.n_columns + 511) // 512 * 512
        name, address = plain_name(done.name), done.parameters[2 if "mmq" in done.name else 1]
        read = {"quantize_q8": self.read_q8, "quantize_q8_1": self.read_q8_1}.get(name, self.read_mmq)
        values, steps, sums = read(w, address, n, width)
        return Activations(values[:, :w.n_columns], steps[:, :w.n_columns], sums[:, :(w.n_columns + 31) // 32])

    def read_q8(self, w: Weights, address: int, n: int, width: int):
        dtype, per_block = BLOCK_Q8[w.block_size], w.block_size // 32
        y = self.device.memory.read(address, dtype, (n, width // 32 * 36 // dtype.itemsize))
        d = (y["sum_d"]["d"].astype(np.uint32) << 16).view(np.float32).astype(np.float64)[..., None]
        in_order = lambda threads: threads.reshape(n, -1, per_block, 8, 4).swapaxes(2, 3).reshape(n, -1)  # noqa: E731
        return in_order(y["qs"][..., code_places(w.name)] * d), in_order(np.broadcast_to(d, y["qs"].shape)), np.zeros((n, width // 32))

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
    """float64 (rows, columns): values d*q and steps d; sums of 32 values, where a format keeps them (rows, columns/32)."""
    values: np.ndarray
    steps: np.ndarray
    sums: np.ndarray

    def check(self, lib, name: str, x: np.ndarray) -> None:
        """They are the inputs, rotated where the type wants that, within half a step. The division by 127 and the reciprocal may be off
        in the last bit, the rotation by sixteen roundings of parts of the largest value. Upstream's own keep the scale as half, rounded after
        the codes were found with it."""
        exact = rotated(lib, name, x) if name in WEIGHT_TYPES else x
        off = 0.5 + 128 * 20 * F32_U + (0 if name in WEIGHT_TYPES else 127 * HALF_U)
        assert (np.abs(self.values - exact) <= self.steps * off + 1e-30).all()

    def rows(self, index) -> Activations:
        return Activations(self.values[index], self.steps[index], self.sums[index])


def exact(w: Weights, expert: int, y: Activations) -> tuple[np.ndarray, np.ndarray]:
    """float64 (columns, rows): the product with the activations as they are, and the largest error of a kernel that adds in float.

    A thread's sum of products is exact in integers; it is rounded on its way to float, times two scales, and with its offset: at most
    six roundings of parts of M = sum of magnitude |y|. Adding up takes one for each 32 weights at most, and eight for warps and lanes."""
    n_roundings = 6 + w.n_columns // 32 + 8
    bound = n_roundings * F32_U * (np.abs(y.values) @ w.magnitude[expert].T)
    if w.name == "iq2_xxs":  # upstream divides integers there: by 2 and by 4 for 32 weights, of a scale below that
        bound += 1.25 * LARGEST_STOCK_SCALE * y.steps[:, ::32].sum(1, keepdims=True)
    return y.values @ w.product[expert].T, bound


def exact_in_tiles(w: Weights, expert: int, y: Activations) -> tuple[np.ndarray, np.ndarray]:
    """The same for MMQ, which may be off more where tiles keep a minimum as half, and activations their sum as half: both are rounded,
    and the sum is upstream's of the values before they were rounded (for Q4_K)."""
    want, bound = exact(w, expert, y)
    if w.name not in KEEPS_HALVES:
        return want, bound
    groups = lambda a: a.reshape(*a.shape[:-1], -1, 32)  # noqa: E731
    of_codes = groups(y.values).sum(-1)
    off = np.abs(y.sums - of_codes) + 2 * HALF_U * np.abs(of_codes)
    bound = bound + off @ groups(w.magnitude[expert]).max(-1).T
    if w.name == "q4_K":
        bound += HALF_U * np.abs(y.values) @ np.abs(w.product[expert]).T
    return want, bound


@functools.cache
def inputs(n: int, n_columns: int, seed: int = 5) -> np.ndarray:
    x = np.random.default_rng(seed + n).standard_normal((n, n_columns)).astype(np.float32)
    x[0, ::7] *= 100  # groups with another range
    return x
