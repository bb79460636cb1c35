"""What a calibration costs in time and memory, and which second moments are worth it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.units import GIB
from .._formats.gguf_file import GGUFFile
from .._formats.hessians import ENOUGH_TOKENS, packed_size
from .._native.product import product_rate
from .._plan.rules import OUTPUT, TOKEN_EMBD
from .._plan.uses import n_layers_run

# Operations a second of llama.cpp's products on an AVX2 core, where they are not measured: of small models, whose calibration takes
# a minute.
FLOPS_A_THREAD = 40e9
SMALL = 1 << 28  # bytes
# Of the rate of a single product, what a whole graph reaches, with attention, norms and the sums of moments.
GRAPH_SHARE = 0.85
MAX_FACTORIZATION_SECONDS = 900  # that choose_importance() accepts
# n^3/3 a second and thread of encode/metric.c, in double precision: 14e9 and 20e9 measured on a core of a Zen 4 EPYC, n 2048 and 4096, and
# with two cores 17e9 and 28e9 in all.
FACTORIZATION_RATE = 1e10
# Bytes for each pair of columns while a matrix is factorized: the matrix in double precision, and for llama.cpp's types two of single
# precision; ours take half of one.
FACTORIZATION_BYTES = 16
# Matrices that are multiplied with the same input, by the one that stands for them.
SHARED = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate", "ffn_up_exps": "ffn_gate_exps", "ffn_up_shexp": "ffn_gate_shexp"}


def shared_input(name: str) -> str:
    """The matrix whose input that of a tensor of a layer is: "attn_q" for attn_k and attn_v."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return SHARED.get(stem, stem)


@dataclass(frozen=True)
class Input:
    """An input of weight matrices whose moments are collected."""

    layer: int
    n_columns: int
    n_matrices: int  # 1 or the number of experts
    n_used: int  # of them for a token

    def n_bytes(self, kind: str) -> int:
        """Of the moments, in memory and in the file; sums for the diagonal included."""
        values = 0 if kind == "diagonal" else packed_size(self.n_columns, kind == "full")
        return 4 * self.n_matrices * (values + self.n_columns)

    def flops(self, kind: str) -> float:
        """A token's."""
        return 0 if kind == "diagonal" else 2.0 * self.n_used * packed_size(self.n_columns, kind == "full")


@dataclass(frozen=True)
class Model:
    """What a calibration costs follows from these."""

    n_bytes: int
    inputs: tuple[Input, ...]
    n_weights_used: int  # by a token, in matrix products
    factorization: float  # n^3/3 of whole matrices, once for each weight matrix
    type: GGMLQuantizationType = GGMLQuantizationType.F16  # of most weights

    @classmethod
    def read(cls, file: GGUFFile) -> Model:
        arch = file.value("general.architecture", "")
        n_used = file.value(f"{arch}.expert_used_count", 0)
        sizes = {t.name: t.n_elements for t in file.tensors}
        weights: Counter[GGMLQuantizationType] = Counter()
        n_layers = n_layers_run(file)
        inputs, n_weights_used, factorization = {}, float(sizes.get(OUTPUT, sizes.get(TOKEN_EMBD, 0))), 0.0
        for t in file.tensors:
            name = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", t.name)
            if not name or t.n_dims < 2:
                continue
            n_matrices = t.ne[2] if len(t.ne) > 2 else 1
            used = min(n_used, n_matrices) or n_matrices
            layer, stem = int(name[1]), name[2]
            if n_layers is not None and layer >= n_layers:
                continue
            inputs[layer, SHARED.get(stem, stem), t.ne[0]] = Input(layer, t.ne[0], n_matrices, used)
            weights[t.type] += t.n_elements
            n_weights_used += t.n_elements * used / n_matrices
            factorization += n_matrices * t.ne[0] ** 3 / 3
        most = weights.most_common(1)
        return cls(file.n_bytes, tuple(inputs.values()), int(n_weights_used), factorization, *([most[0][0]] if most else []))

    @property
    def layers(self) -> list[int]:
        return sorted({i.layer for i in self.inputs})

    @property
    def widest(self) -> int:
        """Columns of the widest input."""
        return max(i.n_columns for i in self.inputs)

    def moments_bytes(self, kind: str, layers: list[int] | None = None) -> int:
        return sum(i.n_bytes(kind) for i in self.inputs if layers is None or i.layer in layers)

    def seconds(self, kind: str, n_tokens: int, n_threads: int) -> float:
        """Time of the collection in one pass."""
        flops = 2.0 * self.n_weights_used + sum(i.flops(kind) for i in self.inputs)
        return flops * n_tokens / self.rate(n_threads)

    def rate(self, n_threads: int) -> float:
        """Operations a second of llama.cpp on the model's products, measured where the model is large enough for that to matter."""
        measured = None if self.n_bytes < SMALL else product_rate(int(self.type), n_threads)
        return FLOPS_A_THREAD * n_threads if measured is None else GRAPH_SHARE * measured

    def factorization_seconds(self, n_threads: int, n_types: int) -> float:
        """Rough time, at most, of all threads: once for OUT.

        n_types: with a target, those of its types that take moments. Measuring errors there takes a factorization for each of them, by
        each thread of a matrix of its own; measuring what errors cost takes one more.
        """
        return self.factorization / (FACTORIZATION_RATE * n_threads) * (2 + n_types if n_types else 1)

    def factorization_bytes(self, n_threads: int, n_types: int) -> int:
        """Of memory, at most: for the widest matrix, with a target for one in each thread."""
        return FACTORIZATION_BYTES * self.widest**2 * (n_threads if n_types else 1)


def choose_importance(model: Model, n_tokens: int, memory: float, n_threads: int, n_types: int) -> tuple[str, str]:
    """"full" or "block", and for the latter why not full. n_types: as in Model.factorization_seconds().

    Full where the moments of all layers fit into memory beside the model, and after that what factorizing them takes; where the text
    has 7 tokens for each column of the widest input, below which whole matrices do not surely win on other text; where collecting
    them at most doubles the time of running the model; and where factorizing them stays within 15 minutes.
    """
    needed = max(model.n_bytes + model.moments_bytes("full"), model.factorization_bytes(n_threads, n_types))
    collecting = sum(i.flops("full") for i in model.inputs)
    factorization = model.factorization_seconds(n_threads, n_types)
    if needed > memory:
        return "block", f"whole matrices need {needed / GIB:.1f} GiB at once, {memory / GIB:.1f} are there"
    if n_tokens < ENOUGH_TOKENS * model.widest:
        return "block", f"whole matrices of {model.widest:,} columns need {ENOUGH_TOKENS * model.widest:,} tokens"
    if collecting > 2.0 * model.n_weights_used:
        return "block", "whole matrices would more than double the time of calibration"
    if factorization > MAX_FACTORIZATION_SECONDS:
        return "block", f"whole matrices would take {factorization / 60:.0f} minutes to factorize"
    return "full", ""


def split_layers(model: Model, layers: list[int], memory: float) -> list[list[int]]:
    """The layers in runs of neighbours, each as long as its whole matrices fit beside the model. UserError if one does not."""
    passes: list[list[int]] = []
    for layer in layers:
        if passes and passes[-1][-1] == layer - 1 and model.n_bytes + model.moments_bytes("full", [*passes[-1], layer]) <= memory:
            passes[-1].append(layer)
            continue
        needed = model.n_bytes + model.moments_bytes("full", [layer])
        if needed > memory:
            block = model.n_bytes + model.moments_bytes("block")
            raise UserError(
                f"--importance full: the model and the whole matrices of layer {layer} take {needed / GIB:.2f} GiB, "
                f"{memory / GIB:.2f} GiB may be used; pass a larger --memory, or --importance block, which takes {block / GIB:.2f} GiB"
            )
        passes.append([layer])
    return passes
