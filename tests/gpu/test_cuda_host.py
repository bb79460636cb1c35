"""The device code of cuda/ compiled as host code (cuda_host/), the threads of a warp in turn, against the references.

scripts/gpu/gpu_check.py covers what needs a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import byref, c_float, c_int64, c_void_p

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES
from helpers import native
from helpers.blocks import TYPE_NAMES, bit_coverage_blocks, corner_blocks, dequantize_blocks, rotate_for, type_id
from helpers.cuda_host import (
    BLOCK_MMQ,
    BLOCK_Q8,
    DST,
    HAS_MINIMUM,
    ROTATED,
    assert_same_bits,
    c_array,
    code_positions,
    device,
    pointer,
    quantize_q8,
    scales,
    split_by_thread,
    to_dst,
)

assert BLOCK_Q8[256].itemsize == 2 * BLOCK_Q8[64].itemsize == 8 * 36  # eight block_q8_1


def aligned(data: np.ndarray, offset: int) -> np.ndarray:
    """Copy uint8 data to `offset` bytes after a multiple of 16, with other data around it."""
    buffer = np.full(data.size + 64, 0xA5, np.uint8)
    start = (-buffer.ctypes.data) % 16 + 16 + offset
    buffer[start : start + data.size] = data.ravel()
    return buffer[start : start + data.size]


def row_lengths(name: str, lengths_of_64: tuple[int, ...]) -> tuple[int, ...]:
    """Return row lengths; for blocks of 64 also some that end inside 256 weights, for blocks of 32 half a block of 64 before these."""
    return (*({256: (), 64: lengths_of_64, 32: [n - 32 for n in lengths_of_64]}[TYPES[name].block_size]), 768)


def types_and_lengths(*lengths_of_64: int) -> list[tuple[str, int]]:
    return [(name, n) for name in TYPE_NAMES for n in row_lengths(name, lengths_of_64)]


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_unpack_equals_the_scalar_reference(lib, name, offset):
    """Each bit alone, its complement, random bytes and extreme scales; blocks may start inside a word."""
    info = TYPES[name]
    if offset % np.gcd(info.block_bytes, 4):
        offset = 4  # blocks of 4*n bytes always start at a word
    q, scale, d, z = np.empty(info.block_size, np.uint8), np.empty(4, np.int32), c_float(), c_float()
    n_groups = info.block_size // info.group
    for block in np.concatenate([bit_coverage_blocks(name), corner_blocks(lib, name)]):
        device().cuda_host_unpack(type_id(name), pointer(aligned(block, offset)), pointer(q), pointer(scale), byref(d), byref(z))
        expected = lib.unpack_block(info.id, block)
        same = (np.array_equal(q, expected[0].astype(np.uint8)) and np.array_equal(scale[:n_groups], expected[1][:n_groups])
                and np.array_equal(np.float32([d.value, z.value]), np.float32(expected[2:]), equal_nan=True))
        assert same, f"{name}: block {block.tobytes().hex()}"


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_loads_stay_inside_a_block(name):
    """A block at the start or end of readable memory, or in its last word; a wrong load ends the process by a signal."""
    size, page = TYPES[name].block_bytes, mmap.PAGESIZE
    buffer = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    unpack, protect = device().cuda_host_unpack, ctypes.CDLL(None).mprotect
    out = [np.empty(256, np.int32) for _ in range(4)]
    child = os.fork()
    if child == 0:
        for index in (0, 2 * page):
            protect(c_void_p(start + index), c_int64(page), 0)
        for index in {0, page - size, (page - size) // 4 * 4}:
            unpack(type_id(name), c_void_p(start + page + index), *map(pointer, out))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dst", DST)
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_dequantization_is_bit_equal(lib, name, dst):
    """Contiguous blocks; their number is odd and not a multiple of a thread block's."""
    blocks = np.concatenate([corner_blocks(lib, name)[:17], native.random_blocks(lib, name, (4, TYPES[name].block_size), 1)[:, 0]])
    expected = to_dst(dequantize_blocks(lib, name, blocks), dst)
    out = np.full(expected.shape, 77, expected.dtype)
    device().cuda_host_dequantize(type_id(name), pointer(aligned(blocks, 0)), pointer(out), int(DST[dst][0]), c_int64(out.size))
    assert_same_bits(out, expected, f"{name} to {dst}")


@pytest.mark.parametrize("name, n", types_and_lengths(64, 192, 576, 896, 1088))
def test_strided_dequantization_is_bit_equal(lib, name, n):
    """Rows of a larger tensor: every other row, planes and samples permuted."""
    rows = native.random_blocks(lib, name, (2, 3, 10, n), 2)  # (sample, plane, row, block, byte)
    info, ne, row_blocks = TYPES[name], (n, 5, 2, 3), rows.shape[3]
    expected = dequantize_blocks(lib, name, rows[:, :, ::2].transpose(1, 0, 2, 3, 4))
    strides = (2 * row_blocks, 3 * 10 * row_blocks, 10 * row_blocks)
    out = np.full((*expected.shape[:-1], n), 77, np.float32)
    source = aligned(rows, 0)
    device().cuda_host_dequantize_nc(type_id(name), pointer(source), pointer(out), int(DST["f32"][0]), c_array(ne, c_int64),
                                     c_array(strides, c_int64))
    assert_same_bits(out, expected, name)

    # a copy into rows with gaps gives the same
    wide = np.full((3, 2, 5, n + 32), 77, np.float32)
    nb = [info.block_bytes * s for s in (1, *strides)]
    assert device().cuda_host_copy(type_id(name), pointer(source), pointer(wide), int(DST["f32"][0]), c_array(ne, c_int64),
                                   c_array(nb, ctypes.c_size_t), c_array(wide.strides[::-1], ctypes.c_size_t))
    assert_same_bits(np.ascontiguousarray(wide[..., :n]), expected, name)
    assert (wide[..., n:] == 77).all()


def test_unsupported_copies_are_refused():
    nb, ne = c_array([100, 100, 100, 100], ctypes.c_size_t), c_array([256, 1, 1, 1], c_int64)
    to = c_array([4, 1024, 1024, 1024], ctypes.c_size_t)
    other = int(gguf.GGMLQuantizationType.Q8_0)
    assert not device().cuda_host_copy(type_id("itq3_s"), None, None, other, ne, nb, to)
    assert not device().cuda_host_copy(other, None, None, int(DST["f32"][0]), ne, nb, to)
    apart = c_array([8, 2048, 2048, 2048], ctypes.c_size_t)
    assert not device().cuda_host_copy(type_id("itq3_s"), None, None, int(DST["f32"][0]), ne, nb, apart)


@pytest.mark.parametrize("dst", ["f32", "f16"])
@pytest.mark.parametrize("name, n", types_and_lengths(64, 896, 1344))
def test_get_rows_is_bit_equal(lib, name, n, dst):
    """A batch of two with separate indices."""
    rows = native.random_blocks(lib, name, (2, 7, n), 3)
    row_bytes = rows[0, 0].size
    ids = np.array([[6, 0, 3, 3], [1, 5, 0, 2]], np.int32)
    expected = to_dst(dequantize_blocks(lib, name, np.stack([rows[i][ids[i]] for i in range(2)])), dst)
    out = np.full(expected.shape, 77, expected.dtype)
    size = out.itemsize
    device().cuda_host_get_rows(
        type_id(name), pointer(aligned(rows, 0)), pointer(ids), pointer(out), int(DST[dst][0]), c_int64(n),
        c_array((row_bytes, 7 * row_bytes, 14 * row_bytes), ctypes.c_size_t), c_array((4, 2, 1), c_int64),
        c_array((4, 16, 32), ctypes.c_size_t), c_array((n * size, 4 * n * size, 8 * n * size), ctypes.c_size_t))
    assert_same_bits(out, expected, name)


def reference_q8(lib, name: str, x: np.ndarray) -> np.ndarray:
    """Quantize float32 (..., n) to BLOCK_Q8 (..., blocks or pairs) in the device's float32 arithmetic."""
    dtype = BLOCK_Q8[TYPES[name].block_size]
    v = split_by_thread(rotate_for(lib, name, x), TYPES[name].block_size)
    v = v.reshape(*x.shape[:-1], -1, *dtype["qs"].shape)
    amax = np.abs(v).max(-1)
    d = ((amax / np.float32(127)).view(np.uint32) + np.uint32(0xFFFF)) >> 16  # rounded up to bfloat16
    d = np.where(amax < np.float32(1.5e-36), 0, d).astype(np.uint16)
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / (d.astype(np.uint32) << 16).view(np.float32)
    q = np.rint(v * np.where(d == 0, np.float32(0), inverse)[..., None])
    assert np.abs(q).max() <= 127
    out = np.empty(v.shape[:-2], dtype)
    out["qs"][..., code_positions(name)] = q
    out["sum_d"]["sum"] = q.sum(-1)
    out["sum_d"]["d"] = d
    return out


# the rest depends only on the block size, the code order and the rotation; rows of what a thread block takes, and parts of it
ACTIVATIONS = [("itq3_s", 768), ("ccq2", 768), ("itq4_t", 768), ("itq2_t", 768), ("itq4_t64", 576), *(("itq3_t64", n) for n in (64, 192, 576, 896, 1088)),
               *(("itq2_t32", n) for n in (32, 160, 544, 1120))]


def pad_rows(x: np.ndarray, n: int) -> np.ndarray:
    """Append zeros to float32 (..., m) up to (..., n)."""
    return np.concatenate([x, np.zeros((*x.shape[:-1], n - x.shape[-1]), np.float32)], -1)


@pytest.mark.parametrize("name, n", ACTIVATIONS)
def test_activations_equal_the_reference(lib, name, n):
    """Padded rows, unaligned strides, magnitudes from subnormal to near the largest."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 3, 4, n)).astype(np.float32) * np.float32(10) ** rng.integers(-35, 35, (2, 3, 4, 1))
    x[0, 0, 0] = 0
    x[0, 0, 1] = 0
    x[0, 0, 1, 5:9] = [1e-40, -1e-39, 1.4e-36, 0]
    x[0, 0, 2, n // 2 - 3] = 3e38
    ne0 = (n // 512 + 1) * 512
    y = quantize_q8(name, x, ne0, stride=n + 3)
    assert_same_bits(y, reference_q8(lib, name, pad_rows(x, ne0)), name)
    q = scales(y)
    assert not q[..., n // 32 :].any() and q[1:, :, :, : n // 32].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["itq3_s", "ccq2", "itq3_t64"])
def test_non_finite_activations_give_nan(name, bad):
    """A rotated block is lost entirely, an unrotated one only in one thread."""
    x = np.ones((1, 1, 1, 512), np.float32)
    x[..., 256 + 32 * 5 + 4 * 3 + 1] = bad
    nan_groups = np.flatnonzero(np.isnan(scales(quantize_q8(name, x)))).tolist()
    assert nan_groups == {"itq3_s": list(range(8, 16)), "ccq2": [8 + 3], "itq3_t64": [12, 13]}[name]


@pytest.mark.parametrize("name, n_blocks", [(name, n) for name in TYPE_NAMES for n in (1, 3, 16)] + [("itq3_t64", 9), ("itq2_t64", 14), ("itq3_t32", 5), ("itq4_t32", 22)])
def test_products_match_the_reference(lib, name, n_blocks):
    """Against float64 with the same quantized activations, and against the float product of dequantized weights."""
    block_size, block_bytes = TYPES[name].block_size, TYPES[name].block_bytes
    n = block_size * n_blocks
    rows = native.random_blocks(lib, name, (4, n), 5)
    if n_blocks == 1:
        rows = np.concatenate([rows, corner_blocks(lib, name)[:, None]])
    x = np.random.default_rng(6).standard_normal((2, n)).astype(np.float32)
    y = quantize_q8(name, x[None, None])[0, 0]
    source = aligned(rows, 0)
    # activations start at multiples of 16 bytes, as device buffers do
    columns = [aligned(row.view(np.uint8), 0) for row in y]
    actual = np.array([[device().cuda_host_vec_dot(type_id(name), pointer(source), c_int64(i * n_blocks), pointer(column), c_int64(n_blocks))
                        for i in range(len(rows))] for column in columns], np.float64)

    s, v, magnitude = (split_by_thread(a.reshape(len(rows), n), block_size)
                       for a in native.unpack_reference(lib, name, rows.reshape(-1, block_bytes)))
    dy = scales(y).astype(np.float64)[:, : n // 32]
    qy = y["qs"].reshape(2, -1, 32)[:, : n // 32, code_positions(name)] * dy[..., None]
    exact = np.einsum("rkj,ckj->cr", s * v, qy)
    # Each term rounds four times (the offset's product, the difference, the scales' product, and theirs) in units of
    # M = sum |d_w d_y| (|q| + |offset|) |y|; n/32 terms are added.
    bound = (n // 32 + 5) * native.F32_U * np.einsum("rkj,ckj->cr", np.abs(s) * magnitude, np.abs(qy))
    # products below the smallest normal float32 lose at most 2^-150 each, times sums below 2^24
    wrong = np.argwhere(np.abs(actual - exact) > bound + n // 32 * 2.0**-126)
    assert not wrong.size, f"{name}: row {wrong[0][1]}, {actual[tuple(wrong[0])]}, not {exact[tuple(wrong[0])]}"

    # half a step per activation times the (rotated) weight; the dequantized weights are rounded too
    w = dequantize_blocks(lib, name, rows).astype(np.float64)
    half_steps = np.einsum("rkj,ck->cr", np.abs(s * v), dy / 2)
    rounding = 64 * native.F32_U * np.abs(x).astype(np.float64) @ np.abs(w).T
    with np.errstate(invalid="ignore"):
        assert (np.abs(actual - x.astype(np.float64) @ w.T) <= 1.001 * half_steps + rounding + bound + 1e-30).all()


def test_byte_permutes_follow_cuda():
    """The shim's permutes differ: __byte_perm ignores the selector's fourth bit, prmt replicates the sign bit for it."""
    assert device().cuda_host_byte_perm(0x80FF0001, 0, 0x000B) == 0x01010180
    assert device().cuda_host_prmt(0x80FF0001, 0, 0x000B) & 0xFFFFFFFF == 0x010101FF


@pytest.mark.parametrize("name", ["itq3_s", "itq3_t64"])
def test_rotation_of_unit_vectors_is_exact(lib, name):
    """A unit vector becomes a row of the Sylvester matrix, which one step of 1/16 or 1/8 quantizes exactly."""
    n = TYPES[name].block_size
    for index in {0, 1, 37, n // 2, n - 1, 200}:
        x = np.zeros((1, 1, 1, 256), np.float32)
        x[..., index] = 127 * n**0.5
        y = quantize_q8(name, x)[0, 0, 0]
        d, start = scales(y), index // n * n // 32
        assert (d[start : start + n // 32] == 1).all() and d.sum() == n // 32
        np.testing.assert_array_equal(y["qs"].reshape(-1, 32)[:8, code_positions(name)], split_by_thread(rotate_for(lib, name, x[0, 0, 0]), n))


# --- MMQ

N_ROWS = 128  # rows of a tile in the shim
OFFSETS = {"itq3_s": 4, "ccq2": 32, "ditto3": 64}  # types without an offset in types.toml


def tile_offset(name: str) -> tuple[int, int]:
    """Return (factor, factor*offset) of a tile's int8, factor*code - factor*offset; the factor is 2 if the offset is fractional."""
    info = TYPES[name]
    offset = next(o for o in (info.trellis_offset, info.codebook_offset, OFFSETS.get(name)) if o is not None)
    return (1, int(offset)) if offset == int(offset) else (2, int(2 * offset))


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("layout", ["mma", "dp4a"])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_tiles_hold_exact_weights(lib, name, layout, fallback):
    """Integers times scales equal the reference. ITQ3_S's minimum does not fit in int8 and is rounded to half once.

    The tile is the second 256 weights of each row. Rows of shorter blocks end inside it, after 320 or 288 weights, and the next row
    follows.
    """
    info = TYPES[name]
    n_rows = 77 if fallback else N_ROWS  # rows after the last are not filled
    row_blocks = {256: 3, 64: 5, 32: 9}[info.block_size]
    blocks = np.concatenate([corner_blocks(lib, name)[:40], native.random_blocks(lib, name, (row_blocks * n_rows - 40, info.block_size), 9)[:, 0]])
    n_tile, start = 256 // info.block_size, 256 // info.block_size  # blocks in a tile's row
    allocated = np.concatenate([blocks, np.zeros((n_tile, info.block_bytes), np.uint8)])  # upstream clears the padding of rows
    tile = np.full(100 * N_ROWS, 0x5A5A5A5A, np.int32)
    device().cuda_host_load_tiles(type_id(name), pointer(aligned(allocated, 0)), pointer(tile), start, n_rows - 1, row_blocks, layout == "mma", fallback)
    if layout == "mma":
        words, scale_words = tile[: 76 * N_ROWS].reshape(N_ROWS, 76)[:, :64], tile[: 76 * N_ROWS].reshape(N_ROWS, 76)[:, 64:72]
    else:
        words = tile[: 65 * N_ROWS].reshape(N_ROWS, 65)[:, :64]
        index = 65 * N_ROWS + 8 * np.arange(N_ROWS)[:, None] + np.arange(N_ROWS)[:, None] // 4 + np.arange(8)
        scale_words = tile[index]
    assert (words[n_rows:] == 0x5A5A5A5A).all()
    words, scale_words = words[:n_rows], np.ascontiguousarray(scale_words[:n_rows])
    q = np.ascontiguousarray(words).view(np.int8).reshape(n_rows, 256).astype(np.float64)
    tile_blocks = allocated[row_blocks * np.arange(n_rows)[:, None] + start + np.arange(n_tile)]  # (row, block, byte)
    s, v, _ = (a.reshape(n_rows, 256) for a in native.unpack_reference(lib, name, tile_blocks.reshape(-1, info.block_bytes)))
    factor, centre = tile_offset(name)
    if name in HAS_MINIMUM:
        d, minimum = (scale_words.view(np.float16).reshape(n_rows, 8, 2)[..., i].astype(np.float64) for i in (0, 1))
        codes, _, codes_d, z = zip(*(lib.unpack_block(info.id, b) for b in tile_blocks[:, 0]), strict=True)
        np.testing.assert_array_equal(q, np.stack(codes).astype(np.float64) - centre)
        np.testing.assert_array_equal(d, np.repeat(np.array(codes_d)[:, None], 8, 1))
        exact = np.array(codes_d) * (centre - np.array(z, np.float64))
        with np.errstate(invalid="ignore"):
            is_close = np.abs(minimum - exact[:, None]) <= 2.0**-11 * np.abs(exact[:, None]) + 2.0**-25
        assert (is_close | (np.isinf(minimum) & (np.abs(exact) >= 65504)[:, None])).all()
    else:
        np.testing.assert_array_equal(q, factor * v)
        value = q * np.repeat(scale_words.view(np.float32).astype(np.float64), 32, 1)
        np.testing.assert_array_equal(value, s * v)
    assert np.abs(q).max() <= 127


assert BLOCK_MMQ.itemsize == 4 * 36


def reference_mmq(lib, name: str, x: np.ndarray) -> np.ndarray:
    """Quantize float32 (..., n) to BLOCK_MMQ (..., n/128) in the device's float32 arithmetic."""
    shape = x.shape[:-1]
    v = rotate_for(lib, name, x).reshape(*shape, -1, 4, 32)
    d = np.abs(v).max(-1) / np.float32(127)
    if name in HAS_MINIMUM:
        with np.errstate(over="ignore"):
            h = d.astype(np.float16)
            h = np.where(h.astype(np.float32) < d, np.nextafter(h, np.float16(np.inf)), h)
        d = h.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0)).astype(np.float32)
    q = np.clip(np.rint(v * inverse[..., None]), -127, 127)
    out = np.empty(v.shape[:-2], BLOCK_MMQ)
    out["qs"] = q.reshape(*v.shape[:-2], 128)
    if name in HAS_MINIMUM:
        sums = (d * q.sum(-1, dtype=np.float32)).astype(np.float16)
        out["ds"] = d.astype(np.float16).view(np.uint16).astype(np.uint32) | sums.view(np.uint16).astype(np.uint32) << 16
    else:
        out["ds"] = d.view(np.uint32)
    return out


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name, n", [(name, n) for name in ROTATED for n in row_lengths(name, (64, 192, 576, 896))])
def test_tile_activations_equal_the_reference(lib, name, n, gather):
    """Padded columns, in the order of upstream's buffer: channel, half of 256, column."""
    rng = np.random.default_rng(11)
    ne3, ne2, n_rows = (1, 1, 9) if gather else (2, 3, 5)
    x = (rng.standard_normal((ne3, ne2, n_rows, n + 3)) * 10.0 ** rng.integers(-5, 4, (ne3, ne2, n_rows, 1))).astype(np.float32)
    x[0, 0, 0, :256] = 0
    ids = np.array([3, 3, 8, 0, 1, 7, 2], np.int32) if gather else np.arange(n_rows, dtype=np.int32)
    ne0, ne1 = (n + 511) // 512 * 512, len(ids)
    y = np.full((ne3 * ne2, ne0 // 128, ne1, BLOCK_MMQ.itemsize), 0x55, np.uint8)
    sizes = map(c_int64, (n, n + 3, (n + 3) * n_rows, (n + 3) * n_rows * ne2, ne0, ne1, ne2, ne3))
    assert device().cuda_host_quantize_mmq(type_id(name), pointer(x), pointer(ids) if gather else None, pointer(y), *sizes)
    expected = reference_mmq(lib, name, pad_rows(x[:, :, ids, :n], ne0)).reshape(ne3 * ne2, ne1, ne0 // 128).swapaxes(1, 2)
    y = y.view(BLOCK_MMQ)[..., 0]
    assert_same_bits(y, np.ascontiguousarray(expected), name)
    group_scales = y["ds"].swapaxes(1, 2).reshape(ne3 * ne2, ne1, -1)
    assert not group_scales[..., n // 32 :].any() and group_scales[1:, :, : n // 32].all()


@pytest.mark.parametrize("name, n", [(name, n) for name in ROTATED for n in ((512,) if TYPES[name].block_size == 256 else (512, 448))])
def test_scattered_activations_equal_the_reference(lib, name, n):
    """Each token's row goes to the columns of its experts, in any order."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((4, 520)).astype(np.float32)
    columns = rng.permutation(12).astype(np.int32).reshape(4, 3)
    y = np.full((4, 12, BLOCK_MMQ.itemsize), 0x55, np.uint8)
    device().cuda_host_quantize_scatter(type_id(name), pointer(x), pointer(columns), pointer(y), c_int64(n), c_int64(520), c_int64(512),
                                        c_int64(4), c_int64(12), 3)
    expected = np.empty((4, 12), BLOCK_MMQ)
    expected[:, columns] = reference_mmq(lib, name, pad_rows(x[:, :n], 512)).T[:, :, None]
    assert_same_bits(y.view(BLOCK_MMQ)[..., 0], expected, name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ROTATED)
def test_non_finite_activations_reach_the_tiles(name, bad):
    x = np.ones((1, 512), np.float32)
    x[0, 300] = bad
    y = np.zeros((4, 1), BLOCK_MMQ)
    device().cuda_host_quantize_mmq(type_id(name), pointer(x), None, pointer(y), *map(c_int64, (512, 512, 512, 512, 512, 1, 1, 1)))
    nan_groups = ~np.isfinite(y["ds"].view(np.float16 if name in HAS_MINIMUM else np.float32)).reshape(16, -1).all(1)
    n = TYPES[name].block_size
    first = 300 // n * n // 32
    assert np.flatnonzero(nan_groups).tolist() == list(range(first, first + n // 32))


@pytest.mark.parametrize("name", sorted(set(TYPE_NAMES) - set(ROTATED)))
def test_unrotated_types_use_upstreams_quantizer(name):
    assert not device().cuda_host_quantize_mmq(type_id(name), None, None, None, *map(c_int64, (256,) * 8))
