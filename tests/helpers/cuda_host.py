"""The device code of cuda/ compiled as host code (tests/cuda_host)."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p

import gguf
import numpy as np

from ggml_ext import TYPES
from helpers import native
from helpers.blocks import TYPE_NAMES, type_id

# struct block_q8 of cuda/quantize.cuh: the codes that the threads of one block of 256, two of 64 or four of 32 multiply, their scales
# (bfloat16) and sums (int16)
BLOCK_Q8 = {n: np.dtype([("qs", "i1", (t, 32)), ("sum_d", [("sum", "<i2"), ("d", "<u2")], t)]) for n, t in {256: 8, 64: 4, 32: 4}.items()}


@functools.cache
def device() -> ctypes.CDLL:
    ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    dll = ctypes.CDLL(str(native.require_built(native.BUILD, "libggml-ext-cuda-host.so")))
    dll.cuda_host_vec_dot.restype = c_float
    dll.cuda_host_copy.restype = dll.cuda_host_quantize_mmq.restype = ctypes.c_bool
    return dll


def pointer(array: np.ndarray) -> c_void_p:
    return array.ctypes.data_as(c_void_p)  # keeps the array alive


def c_array(values, ctype):
    return (ctype * len(values))(*map(int, values))


def quantize_q8(name: str, x: np.ndarray, ne0: int | None = None, stride: int | None = None) -> np.ndarray:
    """Quantize float32 (ne3, ne2, ne1, n) to BLOCK_Q8 (ne3, ne2, ne1, structs) for weights of a type; rows are padded to ne0."""
    ne3, ne2, ne1, n = x.shape
    ne0, stride = ne0 or (n + 511) // 512 * 512, stride or n
    buffer = np.full((ne3, ne2, ne1, stride), 1e30, np.float32)
    buffer[..., :n] = x
    out = np.full((ne3, ne2, ne1, ne0 // 32 * 36), 0x55, np.uint8)
    sizes = (n, stride, stride * ne1, stride * ne1 * ne2, ne0, ne1, ne2, ne3)
    device().cuda_host_quantize(type_id(name), pointer(buffer), pointer(out), *map(c_int64, sizes))
    return out.view(BLOCK_Q8[TYPES[name].block_size])


def scales(y: np.ndarray) -> np.ndarray:
    """Return the scales of BLOCK_Q8 (..., n), one per 32 values: float32 (..., n * threads)."""
    return (y["sum_d"]["d"].astype(np.uint32) << 16).view(np.float32).reshape(*y.shape[:-1], -1)


def split_by_thread(x: np.ndarray, block_size: int) -> np.ndarray:
    """Reorder (..., n) to (..., n/32 threads, 32): value L*g + 4*k + b of a block, L = block_size/8, goes to [k, 4*g + b]."""
    shape = x.shape[:-1]
    return x.reshape(*shape, -1, 8, block_size // 32, 4).swapaxes(-3, -2).reshape(*shape, -1, 32)


PAIR_DISTANCE = {"ditto3": 2, "ditto5": 1, "itq4_t": 1, "itq4_t64": 1, "itq4_t32": 1} | {
    f"itq{k}_t{n}": 4 for k in ("3", "2", "1h", "1") for n in ("", "64", "32")}


def code_positions(name: str) -> np.ndarray:
    """Return int (32,): the position at which a thread has activation [4*g + b] of `split_by_thread`.

    Types in PAIR_DISTANCE look up groups g and g + PAIR_DISTANCE together: bytes 0 and 1 of both are in the first word, 2 and 3 in the second.
    """
    g, b = np.divmod(np.arange(32), 4)
    if name not in PAIR_DISTANCE:
        return 4 * g + b
    second = g // PAIR_DISTANCE[name] % 2
    return 4 * (g - second * PAIR_DISTANCE[name] + b // 2 * PAIR_DISTANCE[name]) + 2 * (b % 2) + second


HAS_MINIMUM = {"itq3_s"}
BLOCK_MMQ = np.dtype([("ds", "<u4", 4), ("qs", "i1", 128)])
ROTATED = [name for name in TYPE_NAMES if TYPES[name].rotated]

# result types: id and numpy dtype
DST = {"f32": (gguf.GGMLQuantizationType.F32, np.float32), "f16": (gguf.GGMLQuantizationType.F16, np.float16),
       "bf16": (gguf.GGMLQuantizationType.BF16, np.uint16)}


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even; return its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_dst(x: np.ndarray, dst: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return bfloat16(x) if dst == "bf16" else x.astype(DST[dst][1])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    a, e = actual.view(np.uint8).reshape(*actual.shape, -1), expected.view(np.uint8).reshape(*expected.shape, -1)
    wrong = np.argwhere((a != e).any(-1))
    assert not wrong.size, f"{what}: {len(wrong)} values differ, first at {wrong[0]}: {actual[tuple(wrong[0])]}, not {expected[tuple(wrong[0])]}"
