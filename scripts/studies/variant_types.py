"""The papers' other variants, as variants.py measures them: what each stores, and the weights that come back from it.

ITQ3_S  rotated by transforms of 32 to 512; half d, half z and 3-bit codes of a block, and the paper's eight FP16 scales of
        sub-blocks (116 bytes)
CCQ     (4, 3, 2), 2.75 bits, and (3, 3, 2) with (3, 4, 2), 2.5 bits: sections 3.2 to 3.4 and table 1 of the paper
DITTO   codebooks of 8, 16 and 32 entries: of each block (int8 under a half), of a tensor; and, no paper's, of a tensor under a
        half for each block, and the same with one codebook for all tensors of all models, a constant of the type

Searches are in variant_levels.c (ITQ3_S), variant_vectors.c (CCQ) and variant_codebooks.c (DITTO); with importances they weigh the
squared error of the unrotated weights, as the project's own encoders do. Needs a C compiler, `cc`.
"""
from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggml_ext._base.errors import UserError
from ggml_ext.quants import SIGNS
from ggml_ext.quants._metric import FLOOR, butterflies

SOURCES = [Path(__file__).with_name(f"variant_{name}.c") for name in ("levels", "vectors", "codebooks")]
# -ffast-math but for its start-up code, which would make subnormal numbers zero in the whole process
COMPILE = ("cc", "-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
           "-ffinite-math-only", "-shared", "-fPIC")
FIXTURE = Path(__file__).resolve().parents[2] / "tests" / "data" / "minilm_ffn_down.npy"
BLOCK, CODE_BYTES = 256, {b: 32 * b for b in (3, 4, 5)}  # of a block of b bits a weight
TRANSFORMS = (32, 64, 128, 256, 512)
# The first 256 are those of the types; a transform of 512 takes as many others.
LONG_SIGNS = np.concatenate([SIGNS, np.random.default_rng(512).choice(np.array([-1, 1], np.float32), 256)])
FIXED_BLOCKS = 32           # of each source of the codebook for all models
FIXED_TOP = 63              # its largest integer: more would saturate AVX2's sums of products
N_TURNS = 3                 # of a codebook and its scales
CODEBOOK_SAMPLES = 1 << 12  # bins of equal weight that a tensor's codebook is found from
TRAINING = 1 << 14          # weights of a tensor that they are made of
# scales over the root mean square
CCQ_STARTS = {"ccq-2.75": (0.19, 0.23, 0.27, 0.31, 0.36, 0.42), "ccq-2.5": (0.32, 0.40, 0.47, 0.54, 0.62, 0.72)}

Importance = np.ndarray | None
Encode = Callable[[np.ndarray, Importance, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Variant:
    """encode: rows float32 (n_rows, n), importances float32 (n,) or None, the tensor's weights for its codebook -> what is
    stored, as weights of the shape of the rows."""

    name: str
    bits: float  # a weight, everything in the block counted
    encode: Encode
    multiple: int = BLOCK  # of which rows must be one


@functools.cache
def load() -> ctypes.CDLL:
    """The searches, compiled. UserError without a compiler."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "variant_search.so"
        try:
            subprocess.run([*COMPILE, *map(str, SOURCES), "-o", str(path), "-lm"], capture_output=True, text=True, check=True)
        except OSError as e:
            raise UserError(f"cannot run the C compiler {COMPILE[0]!r}: {e.strerror}; install one") from e
        except subprocess.CalledProcessError as e:
            why = next((line for line in e.stderr.splitlines() if "error" in line), f"exit code {e.returncode}")
            raise UserError(f"the C compiler {COMPILE[0]!r} fails on variant_*.c: {why}") from e
        lib = ctypes.CDLL(str(path))
    i, n, p = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    lib.encode_levels.argtypes = [i, i, i, n, n, p, p, p, p]
    lib.encode_vectors.argtypes = [i, p, p, p, i, p, i, p, i, n, n, p, p, p]
    lib.cluster.argtypes = [i, p, p, i, p]
    lib.encode_codebooks.argtypes = [i, i, i, n, n, p, p, p]
    lib.encode_scaled.argtypes = [i, i, p, ctypes.c_float, n, n, p, p, p, p]
    lib.encode_levels.restype = lib.encode_scaled.restype = None
    return lib


def call(name: str, *args) -> None:
    """A function of the searches; arrays as pointers to them. MemoryError if it has none."""
    if getattr(load(), name)(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args)):
        raise MemoryError


# --- ITQ3_S -----------------------------------------------------------------------------------------------------------------


def transform(x: np.ndarray, size: int, back: bool = False) -> np.ndarray:
    """H S x, or back S H x, of each `size` columns of x, float32 (n_rows, a multiple of size)."""
    signs, blocks = LONG_SIGNS[:size], x.reshape(len(x), -1, size)
    factor = np.float32(1 / np.sqrt(size))
    return (butterflies(blocks) * (factor * signs) if back else butterflies(blocks * signs) * factor).reshape(x.shape)


def forms(importance: np.ndarray, size: int, span: int) -> tuple[np.ndarray, np.ndarray]:
    """What errors of rotated weights cost: the matrix of each span of columns, float32 (n_spans, span, span), and its gains.

    A mean of 1 and the floor of the project's encoders. e^T M e is the sum over i of d[i] (e[i] + sum over j < i of gain[i][j]
    e[j])^2.
    """
    w = importance.reshape(-1, span).astype(np.float64)
    mean = w.mean(1, keepdims=True)
    w = np.where(mean > 0, w / np.where(mean > 0, mean, 1) + FLOOR, 1)
    index = np.arange(size)
    spectrum = butterflies(w.reshape(len(w), -1, size)) / size
    of_transform = spectrum[:, :, index[:, None] ^ index]
    m, gains = np.zeros((len(w), span, span)), np.zeros((len(w), span, span))
    for k in range(span // size):
        here = slice(k * size, (k + 1) * size)
        m[:, here, here] = of_transform[:, k]
        lower = np.linalg.cholesky(of_transform[:, k, ::-1, ::-1])[:, ::-1, ::-1].transpose(0, 2, 1)  # M = lower^T lower
        gains[:, here, here] = np.tril(lower / np.einsum("bii->bi", lower)[:, :, None], -1)
    return m.astype(np.float32), gains.astype(np.float32)


def encode_itq3_s(rows: np.ndarray, importance: Importance, size: int, part: int, group: int) -> np.ndarray:
    """A zero point for `part` weights, a scale for `group` of them, transforms of `size`."""
    if rest := rows.shape[1] % max(size, part):  # what a long transform leaves is for shorter ones
        cut = rows.shape[1] - rest
        halves = [(rows[:, :cut], importance if importance is None else importance[:cut], size, part),
                  (rows[:, cut:], importance if importance is None else importance[cut:], min(size, rest), min(part, rest))]
        return np.concatenate([encode_itq3_s(*h, group if group < part else h[3]) for h in halves if h[0].shape[1]], axis=1)
    span = max(size, part)
    x = np.ascontiguousarray(transform(rows, size))
    out = np.empty_like(x)
    m, gains = (0, 0) if importance is None else forms(importance, size, span)
    call("encode_levels", span, part, group, len(x), x.shape[1] // span, m, gains, x, out)
    return transform(out, size, back=True)


def itq3_s_variants() -> list[Variant]:
    def make(name: str, n_bytes: int, size: int, part: int, group: int) -> Variant:
        return Variant(name, 8 * n_bytes / part, lambda rows, w, _: encode_itq3_s(rows, w, size, part, group), max(size, BLOCK))

    out = [make(f"itq3_s-t{t}", 100, t, BLOCK, BLOCK) for t in TRANSFORMS]
    out += [make(f"itq3_s-own{t}", 4 + 3 * t // 8, t, t, t) for t in TRANSFORMS if t != BLOCK]  # d and z for each transform
    return out + [make(f"itq3_s-sub-t{t}", 116, t, BLOCK, 32) for t in TRANSFORMS]


# --- CCQ --------------------------------------------------------------------------------------------------------------------


def code_values(shifts: list[int], n_bits: int, length: int) -> np.ndarray:
    """Values float32 (2^n_bits, len(shifts)) of all codes, `length` bits a state, about zero."""
    codes = np.arange(1 << n_bits)[:, None]
    return ((codes >> np.array(shifts) & (1 << length) - 1) - ((1 << length) - 1) / 2).astype(np.float32)


# Codes of 64 weights: their tables, which of them one after the other, bits of the mantissa of a group's scale.
# 2.75: 21 bytes of three weights, four bits of one more and a scale of four, under a super scale (E5M3) for 256 weights.
# 2.5: nine words of three (the upper seven bits) and four weights, then three bits of one more and 13 of its scale: E5M8, no
# sign.
CCQ = {
    "ccq-2.75": (2.78125, [code_values([4, 2, 0], 8, 4), code_values([0], 4, 4)], [0] * 21 + [1], 0),
    "ccq-2.5": (2.5, [code_values([4, 2, 0], 7, 3), code_values([6, 4, 2, 0], 9, 3), code_values([0], 3, 3)],
                [0, 1] * 9 + [2], 8),
}


def encode_ccq(rows: np.ndarray, importance: Importance, name: str) -> np.ndarray:
    _, tables, which, mantissa_bits = CCQ[name]
    x, out = np.ascontiguousarray(rows), np.empty(rows.shape, np.float32)
    w = 0 if importance is None else np.ascontiguousarray(importance, np.float32)
    sizes = np.array([t.shape for t in tables], np.int32).T.copy()
    values = np.concatenate([t.ravel() for t in tables])
    starts = np.array(CCQ_STARTS[name], np.float32)
    call("encode_vectors", len(tables), sizes[0], sizes[1], values, len(which), np.array(which, np.int32), mantissa_bits, starts,
         len(starts), x.size // BLOCK, x.shape[1] // BLOCK, x, w, out)
    return out


def ccq_variants() -> list[Variant]:
    return [Variant(name, bits, lambda rows, w, _, name=name: encode_ccq(rows, w, name)) for name, (bits, *_) in CCQ.items()]


# --- DITTO ------------------------------------------------------------------------------------------------------------------


def clusters(values: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """The k best centroids of values under weights, both (n,): float32, ascending."""
    order = np.argsort(values, kind="stable")
    x, w = values[order].astype(np.float64), weights[order].astype(np.float64)
    if len(x) > CODEBOOK_SAMPLES:
        first = np.linspace(0, len(x), CODEBOOK_SAMPLES + 1).astype(int)[:-1]
        total = np.add.reduceat(w, first)
        x, w = np.add.reduceat(x * w, first) / np.where(total > 0, total, 1), total
        x, w = x[w > 0], w[w > 0]
    out = np.zeros(k)
    call("cluster", len(x), np.ascontiguousarray(x), np.ascontiguousarray(w), k, out)
    return out.astype(np.float32)


def weights_like(rows: np.ndarray, importance: Importance) -> np.ndarray:
    return np.broadcast_to(np.float32(1) if importance is None else importance, rows.shape)


def training_rows(tensor: np.ndarray) -> np.ndarray:
    """Rows of a tensor (n_rows, n) without those of zeros, of which a few million weights would say no more than TRAINING do."""
    used = tensor[np.abs(tensor).max(1) > 0]
    return np.ascontiguousarray(used[:: max(1, used.size // TRAINING)], np.float32)


def tensor_codebook(tensor: np.ndarray, importance: Importance, k: int, scaled: bool) -> np.ndarray:
    """Entries float32 (k,) for all blocks; `scaled`: for weights over the scales of their blocks, found in turn with them."""
    rows = training_rows(tensor)
    if not rows.size:
        return np.zeros(k, np.float32)
    weights = weights_like(rows, importance)
    if not scaled:
        return clusters(rows.ravel(), weights.ravel(), k)
    blocks, weights = rows.reshape(-1, BLOCK), weights.reshape(-1, BLOCK)
    own, usual = np.sqrt((blocks**2).mean(1)), root_mean_square(rows)
    best = None
    for scales in (own, np.full_like(own, usual)):
        for _ in range(N_TURNS):
            good = scales > 0
            d = scales[good, None]
            level = clusters((blocks[good] / d).ravel(), (weights[good] * d**2).ravel(), k)
            stored, scales = encode_scaled(rows, importance, level, usual)
        error = float((weights * (stored.reshape(blocks.shape) - blocks) ** 2).sum())
        if best is None or error < best[0]:
            best = error, level
    return best[1]


def encode_scaled(rows: np.ndarray, importance: Importance, level: np.ndarray, usual: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights from entries under a scale of each block, a half; and the scales (n_blocks,).

    usual: a scale to try; 0: all are 1.
    """
    x, out, scales = np.ascontiguousarray(rows), np.empty(rows.shape, np.float32), np.empty(rows.size // BLOCK, np.float32)
    w = 0 if importance is None else np.ascontiguousarray(importance, np.float32)
    call("encode_scaled", BLOCK, len(level), level, usual, x.size // BLOCK, x.shape[1] // BLOCK, x, w, scales, out)
    return out, scales


def encode_ditto_tensor(rows: np.ndarray, importance: Importance, tensor: np.ndarray, k: int, scaled: bool) -> np.ndarray:
    """With one codebook for the tensor, found from all of it; `scaled`: under a scale for each block."""
    usual = root_mean_square(tensor) if scaled else 0.0
    return encode_scaled(rows, importance, tensor_codebook(tensor, importance, k, scaled), usual)[0]


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float32), dtype=np.float64)))


@functools.cache
def fixed_codebook(k: int) -> np.ndarray:
    """That of blocks of which half are Gaussian and half feed-forward projections of all-MiniLM-L6-v2, as integers times a step.

    Before they were rounded, 32 entries had these errors on the reference model: from Gaussian blocks 0.00222, from both 0.00220,
    from MiniLM alone 0.0028, from a Student t with six degrees of freedom 0.0030.
    """
    real = np.load(FIXTURE).astype(np.float32).reshape(-1, BLOCK)[:FIXED_BLOCKS]
    blocks = np.concatenate([np.random.default_rng(7).standard_normal(real.shape, np.float32), real])
    level = tensor_codebook(blocks / np.sqrt((blocks**2).mean(1, keepdims=True)), None, k, True)
    step = np.abs(level).max() / FIXED_TOP
    return np.rint(level / step) * step


def encode_ditto_fixed(rows: np.ndarray, importance: Importance, k: int) -> np.ndarray:
    return encode_scaled(rows, importance, fixed_codebook(k), root_mean_square(rows))[0]


def encode_block_codebooks(rows: np.ndarray, importance: Importance, k: int, top: int = 127) -> np.ndarray:
    """Codebooks of each block, as a half times integers up to `top`; 0: as they are."""
    x, out = np.ascontiguousarray(rows), np.empty(rows.shape, np.float32)
    w = 0 if importance is None else np.ascontiguousarray(importance, np.float32)
    call("encode_codebooks", BLOCK, k, top, x.size // BLOCK, x.shape[1] // BLOCK, x, w, out)
    return out


def ditto_variants() -> list[Variant]:
    def make(bits: int, what: str, n_bits: float, encode: Encode) -> Variant:
        return Variant(f"ditto{bits}-{what}", n_bits, encode)

    out = []
    for bits in (3, 4, 5):
        k = 1 << bits
        out += [
            make(bits, "block", (CODE_BYTES[bits] + 2 + k) / 32, lambda rows, w, _, k=k: encode_block_codebooks(rows, w, k)),
            make(bits, "tensor", bits, lambda rows, w, tensor, k=k: encode_ditto_tensor(rows, w, tensor, k, False)),
            make(bits, "scaled", bits + 2 / 32, lambda rows, w, tensor, k=k: encode_ditto_tensor(rows, w, tensor, k, True)),
            make(bits, "fixed", bits + 2 / 32, lambda rows, w, _, k=k: encode_ditto_fixed(rows, w, k)),
        ]
    return out


VARIANTS = {v.name: v for v in [*itq3_s_variants(), *ccq_variants(), *ditto_variants()]}
