#!/usr/bin/env python3
"""Compare Hessians for experts that saw few tokens: their own, a blend with the layer's mean, one for a group of experts, one for the layer.

    expert_hessians.py [-m MODEL] [-f CALIBRATION_TEXT] [--test-text TEXT] [--types itq2_t,itq3_t] [--layers 1,4,6] [--chunks 100] [-t N]

A dense model serves as a mixture of experts: a random router in the principal components of a layer's inputs sends each token to 2 of 16
experts, all of which have the layer's ffn_gate and ffn_down. Each expert is encoded with the Hessian of its first 1 to 4,000 tokens of the
calibration text, or with a mixture: "blend k" counts the layer's mean as k tokens per column, and shrinks the sum as much as one of all tokens of
the layer; "shrunk k" shrinks it as much as one of these tokens; "group" sums the 4 experts with the most similar routers, "layer" all. Print the error under the Hessian of the same expert's tokens of another text, relative to that of a Hessian of
the identity, as a geometric mean over layers and experts.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from ggml_ext._base.package import PACKAGE_DIR
from ggml_ext._base.threads import usable_cores
from ggml_ext._calibration import by_layer, calibration
from ggml_ext._console.cli import run_script
from ggml_ext._encode.codec import Codec
from ggml_ext._encode.tensor_calibration import TensorCalibration
from ggml_ext._formats.gguf_file import GGUFFile, Tensor
from ggml_ext._formats.hessians import TensorHessian, pack_triangle
from ggml_ext._native import library
from ggml_ext._native.streams import LayerStreams

N_EXPERTS, N_USED, N_COMPONENTS = 16, 2, 24
N_CODED = 4  # experts that are encoded
ROWS = 256  # of each matrix
TOKENS = (1, 10, 100, 1000, 4000)
GROUP = 4  # experts that share a Hessian
STRENGTHS = (1, 4)  # of blends: the tokens that the mean counts for, per column
KINDS = ("own", *(f"blend {k}" for k in STRENGTHS), *(f"shrunk {k}" for k in STRENGTHS), "group", "layer")

Key = tuple[str, int, str]  # type, tokens, and kind of Hessian with the name of the matrix


def read_inputs(args: argparse.Namespace, text: Path, layers: list[int]) -> dict[str, np.ndarray]:
    """Return the inputs of ffn_gate and ffn_down of the layers, float32 (tokens, columns)."""
    command = by_layer.list_command(args.model, text, n_context=512, n_chunks=args.chunks, n_threads=args.threads)
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, LayerStreams(command, Path(directory), only_original=True) as streams:
        for k in range(max(layers) + 1):
            streams.enter_layer(k)
            for chunk in range(streams.n_chunks):
                for group, (x, _) in zip(streams.layers[k], streams.collect_inputs(k, chunk), strict=True):
                    found[group.products[0].weight] += [x.copy()] if k in layers else []
    return {name: np.concatenate(parts) for name, parts in found.items() if parts and ".ffn_" in name}


def make_router(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rows of logits, float32 (experts, columns), of equal variance in the principal components after the first one, which is the mean."""
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    scaled = vectors[:, -1 - N_COMPONENTS : -1] / np.sqrt(np.maximum(values[-1 - N_COMPONENTS : -1], 1e-12))
    return (scaled @ rng.standard_normal((N_COMPONENTS, N_EXPERTS))).T.astype(np.float32)


def route(x: np.ndarray, router: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of each expert, int64 (tokens of the expert,)."""
    used = np.argsort(-(x @ router.T), axis=1)[:, :N_USED]
    return [np.flatnonzero((used == e).any(axis=1)) for e in range(N_EXPERTS)]


def encode(codec: Codec, tensor: Tensor, weights: np.ndarray, qtype: GGMLQuantizationType, hessian: TensorHessian) -> np.ndarray:
    """Return the stored weights, encoded under a Hessian."""
    metric = codec.metric(tensor, qtype, TensorCalibration.from_hessian(None, hessian), 0, lambda _: None)
    return codec.decode(codec.encode(weights, qtype, None, None, metric), qtype, tensor.ne[0])


def make_hessian(mean: np.ndarray, n_tokens: float) -> TensorHessian:
    """Return a Hessian from its packed triangle, float32 (n_values,). n_tokens: which decide how much it is shrunk."""
    n_columns = int((2 * len(mean)) ** 0.5)
    return TensorHessian("", "full", n_columns, np.float32([n_tokens]), np.float32(n_tokens) * mean[None], True)


def make_hessians(x: np.ndarray, tokens: list[np.ndarray], router: np.ndarray, expert: int, n: int) -> dict[str, TensorHessian]:
    """Return the candidates for an expert that saw n tokens. The layer saw as many as that is its share of."""
    share = n / len(tokens[expert])
    seen = [t[: n if e == expert else max(1, round(share * len(t)))] for e, t in enumerate(tokens)]
    sums, counts, columns = np.stack([pack_triangle(x[t].T @ x[t]) for t in seen]), np.float32([len(t) for t in seen]), x.shape[1]
    total, n_all = sums.sum(axis=0), counts.sum()
    near = np.argsort(-(router @ router[expert]) / np.linalg.norm(router, axis=1))[:GROUP]
    out = {"own": make_hessian(sums[expert] / n, n)}
    for k in STRENGTHS:
        blend = (sums[expert] + k * columns * total / n_all) / (n + k * columns)
        out |= {f"blend {k}": make_hessian(blend, n_all), f"shrunk {k}": make_hessian(blend, min(n + k * columns, n_all))}
    return out | {"group": make_hessian(sums[near].sum(axis=0) / counts[near].sum(), counts[near].sum()), "layer": make_hessian(total / n_all, n_all)}


def measure_matrix(codec: Codec, tensor: Tensor, weights: np.ndarray, test: np.ndarray, jobs: dict[Key, TensorHessian], pool: ThreadPoolExecutor) -> dict[Key, float]:
    """Return the error of the weights, float32 (rows, columns), encoded with each Hessian, on the inputs `test`, float32 (tokens, columns)."""

    def measure(key: Key) -> float:
        stored = encode(codec, tensor, weights, GGMLQuantizationType[key[0].upper()], jobs[key])
        return float(np.square(test @ (stored - weights).T).sum() / np.square(test @ weights.T).sum())

    return dict(zip(jobs, pool.map(measure, jobs), strict=True))


def measure_layer(args: argparse.Namespace, codec: Codec, file: GGUFFile, layer: int, inputs: dict[str, np.ndarray], test_inputs: dict[str, np.ndarray]) -> dict[Key, list[float]]:
    """Return the errors of the experts of a layer by type, number of tokens, and kind of Hessian with the name of the matrix."""
    names = {"gate": f"blk.{layer}.ffn_gate.weight", "down": f"blk.{layer}.ffn_down.weight"}
    router = make_router(inputs[names["gate"]], np.random.default_rng(layer))
    tokens, test_tokens = (route(x[names["gate"]], router) for x in (inputs, test_inputs))
    types, results = args.types.split(","), defaultdict(list)
    for matrix, name in names.items():
        tensor = next(t for t in file.tensors if t.name == name)
        weights = codec.weights(file.rows(tensor, 0, min(ROWS, tensor.n_rows)), tensor, 0, GGMLQuantizationType.F32)
        identity = make_hessian(pack_triangle(np.eye(tensor.ne[0], dtype=np.float32)), 1e6)
        for expert in map(int, np.argsort([-len(t) for t in tokens])[:N_CODED]):
            jobs: dict[Key, TensorHessian] = {(t, 0, f"identity {matrix}"): identity for t in types}
            for n in (n for n in TOKENS if n <= len(tokens[expert])):
                for kind, hessian in make_hessians(inputs[name], tokens, router, expert, n).items():
                    jobs |= {(t, n, f"{kind} {matrix}"): hessian for t in types}
            with ThreadPoolExecutor(args.threads) as pool:
                measured = measure_matrix(codec, tensor, weights, test_inputs[name][test_tokens[expert]], jobs, pool)
            for key, error in measured.items():
                results[key].append(error)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=Path("data/model-f16.gguf"))
    add("-f", "--file", type=Path, default=calibration.TEXT)
    add("--test-text", type=Path, default=PACKAGE_DIR / "data" / "evaluation.txt")
    add("--types", default="itq2_t,itq3_t")
    add("--layers", default="1,4,6")
    add("--chunks", type=int, default=100)
    add("-t", "--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    layers, file, codec = [int(n) for n in args.layers.split(",")], GGUFFile(args.model), Codec(library.load(), effort="fast")
    inputs, test_inputs = (read_inputs(args, text, layers) for text in (args.file, args.test_text))
    results: dict[Key, list[float]] = defaultdict(list)
    for layer in layers:
        for key, errors in measure_layer(args, codec, file, layer, inputs, test_inputs).items():
            results[key] += errors
    print(f"| type, matrix | tokens | {' | '.join(KINDS)} |\n" + "| --- " * (2 + len(KINDS)) + "|")
    for type_name in args.types.split(","):
        for matrix in ("gate", "down"):
            unit = np.log(results[type_name, 0, f"identity {matrix}"])
            for n in TOKENS:
                kinds = [np.log(results[type_name, n, f"{kind} {matrix}"]) for kind in KINDS]
                if len(kinds[0]) == len(unit):
                    print(f"| {type_name.upper()}, {matrix} | {n:,} | " + " | ".join(f"{np.exp(np.mean(k - unit)):.3f}" for k in kinds) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
