"""CPU kernels of every weight type against exact references: unpack, vec_dot, GEMM, mul_mat_id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from ctypes import c_int, c_int64, c_size_t, c_void_p

import gguf
import numpy as np
import pytest

from ggml_ext import TYPES
from helpers import native
from helpers.blocks import TYPE_NAMES, bit_coverage_blocks, corner_blocks, row_lengths
from helpers.native import EMULATED_ISAS, F32, I32, ISAS, dot_reference, kernels


def quantize_activations(isa: str, type_name: str, x: np.ndarray) -> np.ndarray:
    """Quantize with the kernels of isa. All rows are rotated; products do not depend on whether the type is."""
    return kernels(isa).quantize_rotated(x, {256: "q8_kr", 64: "q8_kr64", 32: "q8_kr32"}[TYPES[type_name].block_size])


ALL_ISAS = [*ISAS, "native"]


@pytest.mark.parametrize("isa", ISAS)
def test_kernels_report_their_instruction_set(isa):
    """Otherwise a test of "avx2" could run the portable code."""
    assert kernels(isa).isa == native.ISA_NAMES[isa.removeprefix("arm64-").removesuffix("-host")]


@pytest.mark.extra_build
@pytest.mark.parametrize("isa", [isa for isa in ["avx2", "avx512", "amx"] if isa in native.LOCAL_ISAS])
def test_emulated_intrinsics_equal_native_ones(isa):
    """tests/simd_host emulates intrinsics that this CPU may lack; here it is compared with those it has."""
    done = subprocess.run([native.require_built(native.BUILD, f"ggml-ext-simd-host-{isa}")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_native_build_uses_the_best_instruction_set():
    assert kernels("native").isa.startswith(native.ISA_NAMES[native.LOCAL_ISAS[-1]])


@pytest.mark.parametrize("cpu", [cpu for isa, cpu in EMULATED_ISAS.items() if isa == "neon"])
def test_emulator_refuses_instructions_that_the_cpu_lacks(cpu):
    """Otherwise "neon" could use dot product instructions unnoticed."""
    name = TYPE_NAMES[0]
    operands = native.pack_request("v", name, 1, bytes(TYPES[name].block_bytes), bytes(native.ACTIVATIONS[TYPES[name].activation].itemsize))
    lacking = subprocess.run(native.emulator_command("ggml-ext-kernels-dotprod", cpu), input=operands, capture_output=True)
    assert lacking.returncode == -signal.SIGILL


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_unpack_equals_the_scalar_reference(lib, type_name, isa):
    """Codes are functions of single bits: each bit alone, its complement and random bytes cover them."""
    blocks = bit_coverage_blocks(type_name)
    expected = np.stack([lib.unpack_block(TYPES[type_name].id, b)[0] for b in blocks]).astype(np.uint8)
    actual = kernels(isa).unpack(type_name, blocks)
    wrong = np.argwhere(actual != expected)
    assert not wrong.size, f"{type_name} on {isa}: block {wrong[0][0]}, weight {wrong[0][1]}: {blocks[wrong[0][0]].tobytes().hex()}"


# below the smallest normal float32 a rounding is at most 2^-150; a product has eight of them
SUBNORMAL = 8 * 2.0**-150


@pytest.mark.parametrize("n_cols", [1, 40])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_with_extreme_scales(lib, type_name, n_cols):
    """Dot products and the GEMM, one block per row."""
    rows = corner_blocks(lib, type_name)[:, None]
    x = np.random.default_rng(10).standard_normal((n_cols, TYPES[type_name].block_size)).astype(np.float32)
    with native.Graph() as g:
        actual = g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (len(rows), x.shape[1])), g.tensor(F32, x, x.shape),
                           shape=(n_cols, len(rows)))
    exact, bound = dot_reference(lib, type_name, rows, kernels("native").quantize_for(type_name, x))
    assert (np.abs(actual - exact) <= bound + SUBNORMAL).all()


@pytest.mark.parametrize("type_name", [name for name in TYPE_NAMES if TYPES[name].block_size < 256])
def test_products_with_scales_far_apart(lib, type_name):
    """The GEMM's panels have a scale for each of four blocks of 64; rows of 32 have dot products. Scales have all magnitudes, one is not finite."""
    block_size = TYPES[type_name].block_size
    group = 256 // block_size
    for n_blocks in range(group + 1, 2 * group + 1):
        rows = corner_blocks(lib, type_name)[:200]
        rows = np.random.default_rng(n_blocks).permutation(np.concatenate([rows] * n_blocks)).reshape(200, n_blocks, -1)
        x = np.random.default_rng(12).standard_normal((20, block_size * n_blocks)).astype(np.float32)

        def product():
            with native.Graph() as g:
                return g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (200, x.shape[1])), g.tensor(F32, x, x.shape),
                                 shape=(20, 200))

        exact, bound = dot_reference(lib, type_name, rows, kernels("native").quantize_for(type_name, x))
        assert (np.abs(product() - exact) <= bound + SUBNORMAL).all()
        for block in range(group):
            for d in (0xF8, 0xFF):  # Inf and NaN
                rows[3 + block, block, 0] = d
                assert not np.isfinite(product()[:, 3 + block]).any(), f"{d:#x} in block {block}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_vec_dot_with_extreme_scales(lib, type_name, isa):
    rows = corner_blocks(lib, type_name)[:, None]
    activations = quantize_activations(isa, type_name, np.random.default_rng(10).standard_normal((1, TYPES[type_name].block_size)))
    exact, bound = dot_reference(lib, type_name, rows, activations)
    actual = np.array([[kernels(isa).vec_dot(type_name, r, activations[0]) for r in rows]], np.float64)
    assert (np.abs(actual - exact) <= bound + SUBNORMAL).all()


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_extreme_scales_dequantize_as_in_numpy(lib, type_name):
    info = TYPES[type_name]
    blocks = corner_blocks(lib, type_name)
    assert lib.validate(info.id, blocks)
    decoded = lib.dequantize(int(info.id), blocks, info.block_size)
    reference = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(int(info.id)))
    np.testing.assert_array_equal(decoded.view(np.uint32), reference.view(np.uint32))


@pytest.mark.parametrize("isa", EMULATED_ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_emulated_cpu_dequantizes_to_the_same_bits(lib, type_name, isa):
    """Equal bits, including signs of zero, from another compiler and CPU."""
    n = TYPES[type_name].block_size
    blocks = np.concatenate([corner_blocks(lib, type_name), native.random_blocks(lib, type_name, (50, n), 11)[:, 0]])
    expected = lib.dequantize(int(TYPES[type_name].id), blocks, n)
    np.testing.assert_array_equal(kernels(isa).dequantize(type_name, blocks).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_non_finite_scales_are_refused(lib, type_name, bad):
    info = TYPES[type_name]
    good = lib.quantize(int(info.id), np.random.default_rng(9).standard_normal((1, info.block_size)).astype(np.float32))
    assert lib.validate(info.id, good)
    for offset in range(0, info.block_bytes, 2):
        block = good.copy()
        block[0, offset : offset + 2] = np.array([bad], np.float16).view(np.uint8)
        finite = np.isfinite(lib.dequantize(int(info.id), block, info.block_size)).all()
        assert lib.validate(info.id, block) == finite, f"{type_name}: {bad} in bytes {offset}, {offset + 1}"


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("n_blocks", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_vec_dot_matches_the_reference(lib, type_name, n_blocks, isa):
    seed = 100 + n_blocks
    for n in row_lengths(type_name, [n_blocks]):
        rows = native.random_blocks(lib, type_name, (5, n), seed)
        activations = quantize_activations(isa, type_name, np.random.default_rng(seed + 1).standard_normal((3, n)))
        exact, bound = dot_reference(lib, type_name, rows, activations)
        actual = np.array([[kernels(isa).vec_dot(type_name, r, a) for r in rows] for a in activations], np.float64)
        worst = np.unravel_index(np.argmax(np.abs(actual - exact) / bound), exact.shape)
        assert (np.abs(actual - exact) <= bound).all(), (
            f"{type_name} on {isa}, rows of {n}, seed {seed}: row {worst[1]} is {actual[worst]}, not {exact[worst]} +- {bound[worst]}: "
            f"{rows[worst[1]].tobytes().hex()[:400]}")


def largest_operands(type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a row with all codes at their largest magnitude and columns of +-127, with which no sum must saturate."""
    info = TYPES[type_name]
    block = np.full(info.block_bytes, 0xFF, np.uint8)
    block[:4] = np.array([1, 0], np.float16).view(np.uint8)
    n_blocks = max(4, 256 // info.block_size)
    rows = np.tile(block, (1, n_blocks, 1))
    activations = np.zeros((2, native.n_groups(n_blocks * info.block_size)), native.ACTIVATIONS[info.activation])
    activations["d"] = 1
    activations["qs"][0], activations["qs"][1] = 127, -127
    if info.block_size < 256:
        activations["sum"] = activations["qs"].sum((-3, -1))
    else:
        activations["bsums"] = activations["qs"].reshape(2, 4, 16, 16).sum(-1)
    return rows, activations


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_vec_dot_does_not_saturate(lib, type_name, isa):
    rows, activations = largest_operands(type_name)
    exact, bound = dot_reference(lib, type_name, rows, activations)
    actual = np.array([[kernels(isa).vec_dot(type_name, rows[0], a)] for a in activations], np.float64)
    assert (np.abs(actual - exact) <= bound).all(), (actual, exact)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    return np.array_equal(actual.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("isa", ALL_ISAS)
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_several_columns_equal_single_columns(lib, type_name, isa):
    """Equal bits whatever the other columns are.

    Column counts reach past twice the number that a kernel takes at once. Rows are ragged in shorter blocks, longer than the kernels lay out
    at once (64 blocks of 256 for one column, eight for eight) and more than the 64 taken at once.
    """
    selected = kernels(isa)
    for n_rows, n in [*((5, n) for n in row_lengths(type_name, [1, 2, 3])), (67, 512), (2, 256 * 9), (2, 256 * 66)]:
        rows = native.random_blocks(lib, type_name, (n_rows, n), n)
        activations = quantize_activations(isa, type_name, np.random.default_rng(n + 1).standard_normal((18, n)) * np.arange(1, 19)[:, None])
        single = np.array([[selected.vec_dot(type_name, r, a) for r in rows] for a in activations], np.float32)
        assert len(np.unique(single, axis=0)) == len(single) and len(np.unique(single, axis=1).T) == n_rows  # so that a swap is visible
        for n_cols in range(1, 19) if n_rows == 5 else [1, 3, 8, 17]:
            first = n_cols % 3 if n_cols < 16 else 0
            actual = selected.dot_columns(type_name, rows, activations[first : first + n_cols])
            wrong = np.argwhere(actual.view(np.uint32) != single[first : first + n_cols].view(np.uint32))
            assert not wrong.size, f"{type_name} on {isa}, rows of {n}, {n_cols} columns: column {wrong[0][0]}, row {wrong[0][1]}"


def gemm_columns(type_name: str) -> int:
    """Return from how many columns on the GEMM must be used: docs/results/speed.md."""
    if kernels("native").isa in ("scalar", "neon") or type_name not in GEMM_TYPES:
        return 1 << 60
    if kernels("native").isa == "avx2":
        return 11 if TYPES[type_name].trellis_values else 80 if type_name == "ccq2" else 29
    return 10 if TYPES[type_name].block_size == 64 else 8 if type_name == "ccq2" else 9


GEMM_TYPES = [name for name in TYPE_NAMES if TYPES[name].block_size > 32]
GEMM_ISAS = [isa for isa in ISAS if isa not in ("scalar", "arm64-scalar", "neon")]  # the others have no GEMM


@pytest.mark.parametrize("isa", GEMM_ISAS)
@pytest.mark.parametrize("type_name", GEMM_TYPES)
def test_gemm_matches_the_reference(lib, type_name, isa):
    """All instruction sets give the same bits, whatever the other rows and columns are. Panels have 16 or 32 rows; tiles 16 or 32 columns."""
    for n_rows, n in [*((5, n) for n in row_lengths(type_name, [1, 2])), (33, 512), (70, 256)]:
        rows = native.random_blocks(lib, type_name, (n_rows, n), n)
        activations = quantize_activations(isa, type_name, np.random.default_rng(n + 1).standard_normal((50, n)) * np.arange(1, 51)[:, None])
        exact, bound = dot_reference(lib, type_name, rows, activations)
        products = kernels(isa).gemm(type_name, rows, activations)
        assert (np.abs(products - exact) <= bound).all(), f"{np.max(np.abs(products - exact) / bound)} times the bound"
        assert same_bits(products, kernels(GEMM_ISAS[0]).gemm(type_name, rows, activations))
        for n_cols in range(1, 51, 1 if n_rows == 5 else 7):
            assert same_bits(kernels(isa).gemm(type_name, rows[-3:], activations[50 - n_cols :]), products[50 - n_cols :, -3:]), f"{n_cols} columns"


@pytest.mark.parametrize("isa", GEMM_ISAS)
@pytest.mark.parametrize("type_name", GEMM_TYPES)
def test_gemm_does_not_saturate(lib, type_name, isa):
    """The blocks and activations of test_vec_dot_does_not_saturate()."""
    rows, activations = largest_operands(type_name)
    exact, bound = dot_reference(lib, type_name, rows, activations)
    assert (np.abs(kernels(isa).gemm(type_name, rows, activations) - exact) <= bound).all()


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_does_not_depend_on_the_batch(lib, type_name, n_threads):
    """Column counts below the GEMM give the bits of single columns, and those of the GEMM those of each other.

    Two matrices serve two batches each, so that the columns of a matrix are not adjacent.
    """
    n_max = min(native.gemm_columns(type_name) - 1, 18) // 2  # two batches per matrix
    n_rows, n = 70, row_lengths(type_name, [3])[-1]
    rows = native.random_blocks(lib, type_name, (2, n_rows, n), 21)
    x = np.random.default_rng(22).standard_normal((4, n_max, n)).astype(np.float32)

    def product(x):
        with native.Graph() as g:
            return g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (2, n_rows, n)), g.tensor(F32, x, x.shape),
                             shape=(4, x.shape[1], n_rows), n_threads=n_threads)

    single = np.concatenate([product(np.ascontiguousarray(x[:, j : j + 1])) for j in range(x.shape[1])], axis=1)
    exact, bound = dot_reference(lib, type_name, rows[1], kernels("native").quantize_for(type_name, x[3]))
    assert (np.abs(single[3] - exact) <= bound).all()
    for n_cols in range(2, n_max + 1):
        assert same_bits(product(np.ascontiguousarray(x[:, :n_cols])), single[:, :n_cols]), f"{type_name}: {n_cols} columns"
    x = np.random.default_rng(25).standard_normal((4, 45, n)).astype(np.float32)
    many = product(x)
    exact, bound = dot_reference(lib, type_name, rows[1], kernels("native").quantize_for(type_name, x[3]))
    assert (np.abs(many[3] - exact) <= bound).all()
    for n_cols in (n for n in (7, 12, 13, 31, 32, 41) if 2 * n >= native.gemm_columns(type_name)):
        assert same_bits(product(np.ascontiguousarray(x[:, :n_cols])), many[:, :n_cols]), f"{type_name}: {n_cols} columns"


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_id_does_not_depend_on_the_batch(lib, type_name, n_threads):
    """Experts of 0 to 9 tokens, on average too few for the GEMM, give the bits of each token alone."""
    n_rows, n, n_expert = 70, row_lengths(type_name, [2])[-1], 10
    experts = native.random_blocks(lib, type_name, (n_expert, n_rows, n), 23)
    rng = np.random.default_rng(24)
    ids = rng.permutation(np.repeat(np.arange(n_expert), np.arange(n_expert))).astype(np.int32)[:, None]
    x = rng.standard_normal((len(ids), 1, n)).astype(np.float32)

    def product(tokens):
        with native.Graph() as g:
            return g.compute("mul_mat_id", g.tensor(TYPES[type_name].id, experts, (n_expert, n_rows, n)),
                             g.tensor(F32, x[tokens], x[tokens].shape), g.tensor(I32, ids[tokens], ids[tokens].shape),
                             shape=(len(x[tokens]), 1, n_rows), n_threads=n_threads)

    together = product(slice(None))
    for token in range(len(ids)):
        assert same_bits(together[token : token + 1], product(slice(token, token + 1))), f"{type_name}: token {token}"


# Around eight columns, where dot products change; around passes of 6 and 12 and tiles of 16 and 32 columns of the GEMM, and its units of
# 512. 65 and 130 rows are ragged in panels of 16 and 32.
COLUMNS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 31, 33, 257, 512, 513, 529]


@pytest.mark.parametrize("n_cols", COLUMNS)
@pytest.mark.parametrize("n_rows, n_blocks", [(65, 1), (16, 2), (7, 3), (130, 5)])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_matches_the_reference(lib, type_name, n_rows, n_blocks, n_cols):
    seed = 1000 * n_cols + n_rows
    n = row_lengths(type_name, [n_blocks])[seed % len(row_lengths(type_name, [n_blocks]))]
    rows = native.random_blocks(lib, type_name, (n_rows, n), seed)
    x = np.random.default_rng(seed + 1).standard_normal((n_cols, n)).astype(np.float32)
    before = kernels("native").dll.ggml_ext_cpu_n_panels()
    with native.Graph() as g:
        actual = g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (n_rows, n)),
                           g.tensor(F32, x, x.shape), shape=(n_cols, n_rows))
    by_gemm = kernels("native").dll.ggml_ext_cpu_n_panels() > before
    assert by_gemm == (n_cols >= gemm_columns(type_name)), "the wrong path ran"
    exact, bound = dot_reference(lib, type_name, rows, kernels("native").quantize_for(type_name, x))
    assert (np.abs(actual - exact) <= bound).all(), f"{type_name}, seed {seed}: {np.max(np.abs(actual - exact) / bound)} times the bound"


@pytest.mark.parametrize("n_tokens", [1, 3, 40, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_id_matches_the_reference(lib, type_name, n_tokens):
    """Experts with no token, one and many; each token uses two of five experts, none uses expert 3."""
    n_expert, n_used, n_rows, n = 5, 2, 70, row_lengths(type_name, [2])[-1]
    rng = np.random.default_rng(n_tokens)
    experts = native.random_blocks(lib, type_name, (n_expert, n_rows, n), n_tokens)
    x = rng.standard_normal((n_tokens, 1, n)).astype(np.float32)
    ids = np.stack([rng.permutation([0, 1, 2, 4])[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    before = kernels("native").dll.ggml_ext_cpu_n_panels()
    with native.Graph() as g:
        actual = g.compute("mul_mat_id", g.tensor(TYPES[type_name].id, experts, (n_expert, n_rows, n)),
                           g.tensor(F32, x, x.shape), g.tensor(I32, ids, ids.shape), shape=(n_tokens, n_used, n_rows))
    by_gemm = kernels("native").dll.ggml_ext_cpu_n_panels() > before
    per_expert = gemm_columns(type_name) * 2 // 3  # on average
    assert by_gemm == (n_tokens * n_used >= per_expert * min(n_expert, n_tokens * n_used)), "the wrong path ran"
    activations = kernels("native").quantize_for(type_name, x[:, 0])
    for expert in np.unique(ids):
        tokens, slots = np.nonzero(ids == expert)
        exact, bound = dot_reference(lib, type_name, experts[expert], activations[tokens])
        assert (np.abs(actual[tokens, slots] - exact) <= bound).all(), f"{type_name}: expert {expert}"


@pytest.mark.parametrize("n_cols", [3, 20])
@pytest.mark.parametrize("type_name", ["itq3_s", "itq3_t64", "ccq2"])
def test_mul_mat_broadcasts_over_views(lib, type_name, n_cols):
    """2 x 3 matrices serve 4 x 3 batches, whose activations are a permuted view with gaps between the rows."""
    n_rows, n = 37, 512
    rows = native.random_blocks(lib, type_name, (2, 3, n_rows, n), 31)
    x = np.random.default_rng(32).standard_normal((4, n_cols, 3, n + 64)).astype(np.float32)
    with native.Graph() as g:
        padded = g.tensor(F32, x, x.shape)
        sizes = [c_int64(n), c_int64(3), c_int64(n_cols), c_int64(4)]
        strides = [c_size_t(4 * (n + 64)), c_size_t(12 * (n + 64)), c_size_t(12 * (n + 64) * n_cols), c_size_t(0)]
        g.base.ggml_view_4d.restype = g.base.ggml_permute.restype = c_void_p
        view = c_void_p(g.base.ggml_view_4d(g.ctx, padded, *sizes, *strides))
        view = c_void_p(g.base.ggml_permute(g.ctx, view, c_int(0), c_int(2), c_int(1), c_int(3)))
        actual = g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (2, 3, n_rows, n)), view, shape=(4, 3, n_cols, n_rows))
    for i3 in range(4):
        for i2 in range(3):
            columns = np.ascontiguousarray(x[i3, :, i2, :n])
            exact, bound = dot_reference(lib, type_name, rows[i3 // 2, i2], kernels("native").quantize_for(type_name, columns))
            assert (np.abs(actual[i3, i2] - exact) <= bound).all(), f"batch {i3}, {i2}"


@pytest.mark.parametrize("n_tokens", [2, 40])
@pytest.mark.parametrize("type_name", ["itq3_s", "itq3_t64", "ccq2"])
def test_mul_mat_id_takes_views(lib, type_name, n_tokens):
    """The experts of a token are columns 1 and 3 of a wider table, and each has activations of its own."""
    n_expert, n_rows, n = 3, 37, 512
    rows = native.random_blocks(lib, type_name, (n_expert, n_rows, n), 33)
    rng = np.random.default_rng(34)
    table = rng.integers(n_expert, size=(n_tokens, 4)).astype(np.int32)
    x = rng.standard_normal((n_tokens, 2, n)).astype(np.float32)
    with native.Graph() as g:
        g.base.ggml_view_3d.restype = g.base.ggml_reshape_2d.restype = c_void_p
        ids = g.tensor(I32, table, table.shape)
        # ne[0] = 1, so that the stride of ne[1] separates the two columns; ggml_permute makes them the experts of a token
        ids = c_void_p(g.base.ggml_view_3d(g.ctx, ids, c_int64(1), c_int64(2), c_int64(n_tokens), c_size_t(8), c_size_t(16), c_size_t(4)))
        g.base.ggml_permute.restype = c_void_p
        ids = c_void_p(g.base.ggml_permute(g.ctx, ids, c_int(2), c_int(0), c_int(1), c_int(3)))
        actual = g.compute("mul_mat_id", g.tensor(TYPES[type_name].id, rows, (n_expert, n_rows, n)), g.tensor(F32, x, x.shape), ids,
                           shape=(n_tokens, 2, n_rows))
    for token in range(n_tokens):
        for slot in range(2):
            activations = kernels("native").quantize_for(type_name, x[token, slot : slot + 1])
            exact, bound = dot_reference(lib, type_name, rows[table[token, 1 + 2 * slot]], activations)
            assert (np.abs(actual[token, slot] - exact[0]) <= bound[0]).all(), f"token {token}, slot {slot}"


@pytest.mark.parametrize("type_name", TYPE_NAMES)
def test_mul_mat_agrees_with_get_rows(lib, type_name):
    """mul_mat against get_rows: without the rotation the error would be as large as the result.

    The difference is the 8-bit rounding of the activations, at most half a step d_y each: |error| <= sum |w| d_y/2, in the domain of the
    stored weights.
    """
    n_rows, n = 32, row_lengths(type_name, [4])[-1]
    rows = native.random_blocks(lib, type_name, (n_rows, n), 5)
    x = np.random.default_rng(6).standard_normal((20, n)).astype(np.float32)
    decoded = lib.dequantize(int(TYPES[type_name].id), np.ascontiguousarray(rows.reshape(n_rows, -1)), n).astype(np.float64)
    stored = decoded
    if TYPES[type_name].rotated:
        stored = lib.rotate(decoded.astype(np.float32).reshape(-1, TYPES[type_name].block_size)).reshape(n_rows, n)
    d_y = np.abs(native.codes_and_scales(kernels("native").quantize_for(type_name, x), n, TYPES[type_name].activation)[1])
    bound = d_y / 2 @ np.abs(stored).T * (1 + 1e-4)  # float32 rounding on top
    for n_cols in (1, 20):
        with native.Graph() as g:
            actual = g.compute("mul_mat", g.tensor(TYPES[type_name].id, rows, (n_rows, n)),
                               g.tensor(F32, x[:n_cols], (n_cols, n)), shape=(n_cols, n_rows))
        error = np.abs(actual - x[:n_cols].astype(np.float64) @ decoded.T)
        assert (error <= bound[:n_cols]).all()
        assert np.abs(actual).max() > 20 * error.max()  # the bound is not vacuous


# one type per kind of kernel; the others take half a minute each and run in make nightly
BACKEND_OPS = ("ccq2", "itq3_t64")


@pytest.mark.extra_build
@pytest.mark.parametrize("binary, arguments", [
    ("test-quantize-fns", ["-v"]),
    *[pytest.param("test-backend-ops", ["test", "-b", "CPU", "-p", f"={name}"], marks=[] if name in BACKEND_OPS else pytest.mark.nightly)
      for name in TYPE_NAMES],
])
def test_upstream_suite_passes(binary, arguments):
    """ggml's own tests with ggml-ext types in their lists.

    On the CPU, test-backend-ops compares the GEMM, here forced for any number of columns, with dot products.
    """
    result = subprocess.run([native.require_built(native.BUILD, binary), *arguments], capture_output=True, text=True, timeout=900,
                            env={**os.environ, "GGML_CPU_TILED_MM_FORCE": "1"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    for name in TYPE_NAMES:
        expected_text = f"{name} dot product error" if binary == "test-quantize-fns" else f"type_a={name}"
        if name in "".join(arguments) or binary == "test-quantize-fns":
            assert expected_text in result.stdout, f"{binary} did not test {name}"
    assert "FAIL" not in result.stdout


# prints the number of panels of a product of 48 columns
COUNT_PANELS = """
import numpy as np
from helpers import native
from ggml_ext import TYPES
from ggml_ext._native import library
rows = native.random_blocks(library.load(), "itq3_t", (64, 256), 1)
x = np.ones((48, 256), np.float32)
with native.Graph() as g:
    g.compute("mul_mat", g.tensor(TYPES["itq3_t"].id, rows, (64, 256)), g.tensor(native.F32, x, x.shape), shape=(48, 64))
print(native.kernels("native").dll.ggml_ext_cpu_n_panels())
"""


def count_panels(**env: str) -> tuple[int, str]:
    """Return the number of panels and standard error."""
    done = subprocess.run([sys.executable, "-c", COUNT_PANELS], cwd=os.path.dirname(__file__), check=True, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env})
    return int(done.stdout), done.stderr


@pytest.mark.skipif(not GEMM_ISAS, reason="this instruction set has no GEMM")
def test_gemm_can_be_switched_off(lib):
    """GGML_CPU_TILED_MM=0 applies to ggml-ext types as to upstream ones; a value that is no number changes nothing, with a warning."""
    assert count_panels(GGML_CPU_TILED_MM="0") == (0, "")
    n_panels, warning = count_panels(GGML_CPU_TILED_MM="1")
    assert n_panels > 0 and not warning
    for value in ("abc", "", "1x"):
        assert count_panels(GGML_CPU_TILED_MM=value) == (n_panels, f'GGML_CPU_TILED_MM: got "{value}", needs 0 or 1: taken as 1\n')
