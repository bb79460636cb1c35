#!/usr/bin/env python3
"""The papers' other variants (variant_types.py) on the matrices of a model, beside our types and llama.cpp's of 1.5 to 6.6 bits.

    variants.py MODEL [--imatrix FILE] [--name NAME] [--weights 1000000] [--types NAME,...] [--below BITS] [--layers N,...]
                [--json docs/variants.json] [-t N]
    variants.py MODEL --imatrix FILE --kld TEXT --types NAME,... [-c 256] [--chunks 200] [--layers N,...] [--logits FILE]
                [--json ...]

MODEL is a GGUF or safetensors file with matrices in F16 or F32.

The first form measures relative squared errors of rows taken evenly from every matrix of the blocks: without importances, over
all matrices together; and with --imatrix, weighted with its diagonal, the mean over the matrices. Rows give whole multiples of
256 weights without the columns of zeros at their ends: of 576 (or 576 padded to 768) the first 512. Every encoder searches as its
best stands in the project: scales refitted, codes by descent where importances of rotated weights are a matrix. Stock types take
what is the better of no importances and equal ones. --below leaves out types of more bits: for weights that were quantized
before, on whose levels such types may be exact. Then, without --types, where the error of DITTO's codebooks comes from, by layer
and class.

The second form stores each type as F16 weights in a copy of the model and scores it with llama-perplexity --kl-divergence, whole
rows and all matrices of the blocks, or of --layers. --logits keeps those of the model for other runs.

Results are added to --json under the model's name; scripts/build/figures.py makes the table and the picture of docs/results/variants.md
from it.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from variant_types import BLOCK, VARIANTS, Importance, encode_block_codebooks

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from ggml_ext import WEIGHT_TYPES
from ggml_ext._base.errors import UserError
from ggml_ext._base.threads import check_threads
from ggml_ext._console.cli import run_script
from ggml_ext._formats.gguf_file import Tensor
from ggml_ext._formats.imatrix import ImportanceMatrix
from ggml_ext._native import library
from perplexity_run import BaseLogits, kl_divergence, save_base_logits

MATRIX = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
CHECKPOINT_MATRIX = re.compile(r".*\blayers?\.(\d+)\.([\w.]+)\.weight")
BITS = (1.5, 6.6)
T = gguf.GGMLQuantizationType
# which do without importances
UNWEIGHTED = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq3_s", "iq4_nl", "iq4_xs", "q4_0", "q4_1", "q5_0", "q5_1"}


@dataclass(frozen=True)
class Matrix:
    """tensor: float32 (n_rows, n), rows: some of them. importance: float32 (n,) or None."""

    layer: int
    kind: str
    tensor: np.ndarray
    rows: np.ndarray
    importance: Importance


@dataclass(frozen=True)
class Peer:
    """A type of the library, with the interface of a Variant."""

    name: str
    bits: float
    multiple: int = BLOCK

    def encode(self, rows: np.ndarray, importance: Importance, tensor: np.ndarray) -> np.ndarray:
        lib, qtype, flat = library.load(), int(T[self.name.upper()]), np.ones(rows.shape[1], np.float32)
        if self.name in WEIGHT_TYPES or importance is not None:
            tries = [importance]
        else:
            tries = [flat, None] if self.name in UNWEIGHTED else [flat]
        found = [lib.dequantize(qtype, lib.quantize(qtype, rows, imatrix=w), rows.shape[1]) for w in tries]
        return min(found, key=lambda stored: squared_sum(stored - rows))


def peers() -> dict[str, Peer]:
    """Our types and the stock ones of BITS, by their lower-case names."""
    out = {}
    for qtype in T:  # gguf knows ours too
        block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
        name, bits = qtype.name.lower(), 8 * n_bytes / block
        if block > 1 and BITS[0] <= bits <= BITS[1]:
            out[name] = Peer(name, bits)
    return out


def squared_sum(x: np.ndarray, weights: Importance = None) -> float:
    columns = np.einsum("ij,ij->j", x, x, dtype=np.float64)
    return float(columns.sum() if weights is None else columns @ weights)


def block_matrices(path: Path, mode: str = "r") -> list[tuple[int, str, gguf.ReaderTensor]]:
    """Layer, class and tensor of the matrices of the blocks. UserError where there are none in F16 or F32."""
    found = [(m, t) for t in gguf.GGUFReader(path, mode).tensors if (m := MATRIX.fullmatch(t.name)) and len(t.shape) == 2]
    if not found or any(t.tensor_type not in (T.F16, T.F32) for _, t in found):
        kinds = ", ".join(sorted({t.tensor_type.name for _, t in found})) or "none"
        raise UserError(f"{path}: its matrices of blocks are {kinds}; needed a model with all of them in F16 or F32")
    return [(int(m[1]), m[2], t) for m, t in found]


def importance_of(matrix: ImportanceMatrix, tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    n = int(tensor.shape[0])
    if tensor.name not in matrix or matrix.n_values(tensor.name) != n:
        raise UserError(f"--imatrix {path}: has not the {n} importances of {tensor.name}; make one of this model with "
                        "llama-imatrix")
    return matrix.values(Tensor(tensor.name, (n,), tensor.tensor_type, 0, 0))[0]


def checkpoint_matrices(path: Path) -> list[tuple[int, str, np.ndarray]]:
    """Layer, class and weights, float32 (n_rows, n), of the matrices of a safetensors file (a length, JSON, data).

    UserError without any.
    """
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n))
    out = []
    for name, info in header.items():
        if (m := CHECKPOINT_MATRIX.fullmatch(name)) and len(info["shape"]) == 2 and info["dtype"] in ("F32", "F16"):
            first, _ = info["data_offsets"]
            dtype = {"F32": "<f4", "F16": "<f2"}[info["dtype"]]
            values = np.fromfile(path, dtype, offset=8 + n + first, count=np.prod(info["shape"]))
            out.append((int(m[1]), m[2], values.astype(np.float32).reshape(info["shape"])))
    if not out:
        raise UserError(f"{path}: has no matrices of layers in F16 or F32; needed a checkpoint of a transformer")
    return sorted(out, key=lambda found: found[:2])


def read_matrices(model: Path, imatrix: Path | None, n_weights: int, layers: list[int] = ()) -> list[Matrix]:
    """All matrices of the blocks, or of some layers, with about n_weights weights in their rows together."""
    if model.suffix == ".safetensors":
        if imatrix:
            raise UserError(f"{model}: checkpoints have no importance matrix; leave --imatrix out or name a GGUF file")
        found = [(layer, kind, w, None) for layer, kind, w in checkpoint_matrices(model)]
    else:
        importances = ImportanceMatrix(imatrix) if imatrix else None
        found = [(layer, kind, np.asarray(t.data).astype(np.float32), importances and importance_of(importances, t, imatrix))
                 for layer, kind, t in block_matrices(model)]
    found = [of for of in found if not layers or of[0] in layers]
    stride = max(1, round(sum(w.size for _, _, w, _ in found) / n_weights))
    out = []
    for layer, kind, w, importance in found:
        used = np.flatnonzero(np.abs(w).max(0))
        n = (int(used[-1]) + 1 if used.size else 0) // BLOCK * BLOCK
        if n == 0:
            raise UserError(f"{model}: {kind} of layer {layer} has no {BLOCK} columns; needed rows of {BLOCK} weights and more")
        w = w[np.abs(w).max(1) > 0, :n]
        importance = None if importance is None else importance[:n].copy()
        out.append(Matrix(layer, kind, w, np.ascontiguousarray(w[::stride]), importance))
    return out


def measure(kind: object, matrices: list[Matrix], pool: ThreadPoolExecutor) -> np.ndarray | None:
    """Squared error, energy, weighted relative error (NaN without importances) and number of weights of each matrix, float64
    (n_matrices, 4); None where rows are no whole multiples of what the type needs."""
    if any(m.rows.shape[1] % kind.multiple for m in matrices):
        return None

    def errors(m: Matrix) -> tuple[float, float, float, int]:
        plain, relative = kind.encode(m.rows, None, m.tensor) - m.rows, np.nan
        if m.importance is not None:
            weighted = kind.encode(m.rows, m.importance, m.tensor) - m.rows
            relative = squared_sum(weighted, m.importance) / squared_sum(m.rows, m.importance)
        return squared_sum(plain), squared_sum(m.rows), relative, m.rows.size

    return np.array(list(pool.map(errors, matrices)))


def summary(found: np.ndarray) -> list[float | None]:
    """[relative squared error, the weighted one or None]."""
    error, energy, weighted, n = found.T
    figures = error.sum() / energy.sum(), weighted @ n / n.sum()
    return [float(f"{v:.4g}") if np.isfinite(v) else None for v in figures]


def budgets(matrices: list[Matrix], found: dict[str, np.ndarray], pool: ThreadPoolExecutor) -> dict[str, dict[str, list]]:
    """bits -> class -> of each layer the parts of the error of DITTO's codebooks over the energy.

    Codes (a free codebook for each block), then what is added by one codebook for the tensor, by its blocks having no scales, and
    by a block's own codebook being rounded.
    """
    out: dict[str, dict[str, list]] = {}
    for bits in (b for b in (3, 4, 5) if f"ditto{b}-block" in found):
        free = pool.map(lambda m, k=1 << bits: squared_sum(encode_block_codebooks(m.rows, None, k, top=0) - m.rows), matrices)
        block, scaled, tensor = (found[f"ditto{bits}-{what}"] for what in ("block", "scaled", "tensor"))
        for i, (m, least) in enumerate(zip(matrices, free, strict=True)):
            steps = np.array([least, scaled[i, 0] - least, tensor[i, 0] - scaled[i, 0], block[i, 0] - least]) / block[i, 1]
            out.setdefault(str(bits), {}).setdefault(m.kind, []).append([float(f"{v:.3g}") for v in steps])
    return out


def pieces(n_rows: int, n: int) -> Iterator[slice]:
    step = max(1, (1 << 21) // n)
    return (slice(at, at + step) for at in range(0, n_rows, step))


def store(kind: object, model: Path, imatrix: Path, out: Path, layers: list[int], pool: ThreadPoolExecutor) -> None:
    """A copy of the model with the matrices of its blocks, or of some layers, in F16 as the type stores them with importances."""
    shutil.copyfile(model, out)
    importances = ImportanceMatrix(imatrix)
    for layer, _, tensor in block_matrices(out, "r+"):
        if layers and layer not in layers:
            continue
        w, importance = np.asarray(tensor.data).astype(np.float32), importance_of(importances, tensor, imatrix)
        if w.shape[1] % BLOCK:
            raise UserError(f"{model}: {tensor.name} has rows of {w.shape[1]}, no multiple of {BLOCK}; padded_model.py "
                            "makes such rows")
        parts = list(pieces(*w.shape))
        for part, stored in zip(parts, pool.map(lambda p: kind.encode(w[p], importance, w), parts), strict=True):
            tensor.data[part] = stored


def measure_kld(args: argparse.Namespace, kinds: dict, pool: ThreadPoolExecutor) -> dict[str, list[float]]:
    """Type -> [KL divergence, its standard error, perplexity]."""
    found = {}
    with tempfile.TemporaryDirectory() as tmp:
        logits = args.logits or Path(tmp) / "logits.bin"
        base = BaseLogits.read(logits) if logits.exists() else save_base_logits(
            args.model, args.kld, logits, args.ctx_size, args.chunks, args.threads)
        for name, kind in kinds.items():
            path = Path(tmp) / "stored.gguf"
            store(kind, args.model, args.imatrix, path, args.layers, pool)
            figures = kl_divergence(path, base, args.threads)
            found[name] = [*figures["Mean KLD"], figures["Mean PPL(Q)"].value]
            kld, deviation, perplexity = found[name]
            print(f"{name:16} KL divergence {kld:.5f} +- {deviation:.5f}, perplexity {perplexity:.3f}", flush=True)
    return found


def update(path: Path, name: str, **new: dict | list) -> None:
    """Adds results of a model to the file; those of the same types are replaced."""
    results = json.loads(path.read_text()) if path.exists() else {}
    model = results.setdefault(name, {})
    for key, values in new.items():
        model[key] = values if isinstance(values, list) else {**model.get(key, {}), **values}
    text = json.dumps(results, indent=1)
    lists = re.compile(r"\[\s+([^\[\]{]+?)\s+\]")  # of numbers: on a line
    path.write_text(lists.sub(lambda m: f"[{' '.join(m[1].split())}]", text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--imatrix", type=Path)
    add("--name", help="default: the model's file name")
    add("--weights", type=int, default=1_000_000, help="default: 1000000")
    add("--types", help="default: all")
    add("--below", type=float, default=np.inf, metavar="BITS")
    add("--kld", type=Path, metavar="TEXT")
    add("--logits", type=Path)
    add("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[],
        help="to measure, or that --kld changes (default: all)")
    add("-c", "--ctx-size", type=int, default=256)
    add("--chunks", type=int, default=200)
    add("-t", "--threads", type=int)
    add("--json", type=Path)
    args = parser.parse_args()
    all_kinds = {**peers(), **VARIANTS}
    names = args.types.split(",") if args.types else list(all_kinds)
    if unknown := [n for n in names if n not in all_kinds]:
        raise UserError(f"--types: unknown type '{unknown[0]}'; known: {', '.join(all_kinds)}")
    if not args.model.is_file():
        raise UserError(f"{args.model}: no such file; name a model in F16")
    if args.kld and args.imatrix is None:
        raise UserError("--kld needs --imatrix; make one with llama-imatrix, of another text")
    if library.load() is None:
        raise UserError(f"the package has no library; install it, or name a folder with one in {library.DIR_VARIABLE}")
    args.threads, kinds = check_threads(args.threads), {n: all_kinds[n] for n in names}
    name, found = args.name or args.model.stem, {}
    with ThreadPoolExecutor(args.threads) as pool:
        if args.kld:
            found["kld"] = measure_kld(args, kinds, pool)
        else:
            matrices = read_matrices(args.model, args.imatrix, args.weights, args.layers)
            errors, parts = found.setdefault("errors", {}), {}
            print(f"{name}: {sum(m.rows.size for m in matrices):,} weights of {len(matrices)} matrices", flush=True)
            for kind in kinds.values():
                if kind.bits < args.below and (measured := measure(kind, matrices, pool)) is not None:
                    parts[kind.name], errors[kind.name] = measured, [round(kind.bits, 5), *summary(measured)]
                    shown = f"{kind.bits:.4f} bits, relative squared error, and weighted: {errors[kind.name][1:]}"
                    print(f"{kind.name:16} {shown}", flush=True)
            if not args.types:
                found |= {"budget": budgets(matrices, parts, pool), "layers": sorted({m.layer for m in matrices})}
    if args.json:
        update(args.json, name, **found)


if __name__ == "__main__":
    sys.exit(run_script(main))
