"""Time and memory of a calibration, and the choice between block-diagonal and full Hessians."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.units import GIB
from .._formats.gguf_file import GGUFFile
from .._formats.hessians import ENOUGH_TOKENS, kind_for, packed_size
from .._formats.names import has_own_inputs
from .._native.product import product_rate
from .._plan.rules import OUTPUT, TOKEN_EMBD
from .._plan.uses import n_layers_run

# Operations per second of llama.cpp's matrix products on an AVX2 core, for models too small to measure them.
FLOPS_PER_THREAD = 40e9
UNTIMED_BYTES = 1 << 26  # of a model; the products of larger ones are timed
# Part of the rate of a single product that the full graph with attention, norms and Hessians reaches.
GRAPH_SHARE = 0.85
N_COLUMNS = 512  # of a matrix product, the tokens of a chunk
MAX_FACTORIZATION_SECONDS = 900  # that choose_importance() accepts
# n^3/3 per second and thread of encode/metric.c, in double precision: a cautious value (docs/results/cost.md).
FACTORIZATION_RATE = 1e10
# Bytes per pair of columns during factorization: the Hessian in double precision, for upstream types also two in single precision.
FACTORIZATION_BYTES = 16
COPIES = 3  # of a layer's triangles that by_layer.py holds: squares, and one input's packed again
# Matrices that share their input with another one, which represents the input.
SHARED = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate", "ffn_up_exps": "ffn_gate_exps", "ffn_up_shexp": "ffn_gate_shexp"}


def shared_input(name: str) -> str:
    """Return the matrix that represents the input of a tensor, such as "attn_q" for attn_k and attn_v."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return SHARED.get(stem, stem)


@dataclass(frozen=True)
class Input:
    """An input of weight matrices, whose Hessian is collected."""

    layer: int
    n_columns: int
    n_matrices: int  # 1 or the number of experts
    n_used: int  # of these per token
    n_tensors: int = 1  # with this input
    n_rows: int = 0  # of these tensors, all experts together
    is_common: bool = False  # the experts of a token see the same input

    def n_bytes(self, kind: str) -> int:
        """Return the bytes of the Hessians and their diagonals, in memory and in the file."""
        values = 0 if kind == "diagonal" else packed_size(self.n_columns, kind == "full")
        return 4 * self.n_matrices * (values + self.n_columns)

    def flops(self, kind: str) -> float:
        """Return the operations per token that collecting the Hessians takes."""
        return 0 if kind == "diagonal" else 2.0 * self.n_used * packed_size(self.n_columns, kind == "full")


@dataclass(frozen=True)
class CalibrationCost:
    """The cost of calibrating a model, from its properties."""

    n_bytes: int
    inputs: tuple[Input, ...]
    n_weights_used: int  # per token, in matrix products
    factorizations: Mapping[int, float]  # sums of n^3/3 over the weight matrices, by their number of columns n
    type: GGMLQuantizationType = GGMLQuantizationType.F16  # of most weights in the layers
    full_columns: int | None = None  # kind "full" means block-diagonal Hessians for inputs with more columns; None: no limit
    by_layer: bool = False  # collect the Hessians of one layer at a time
    n_expert_weights_used: int = 0  # of n_weights_used
    expert_columns: int = 0  # of a product of an expert, on average

    @classmethod
    def read(cls, file: GGUFFile, mtp_layers: bool = False) -> CalibrationCost:
        """Read the properties from the header of a model. mtp_layers: include the layers that predict further tokens."""
        arch = file.value("general.architecture", "")
        used_key = f"{arch}.expert_used_count"
        n_used = max(file.integers(used_key) or [file.value(used_key) or 0])  # some models have one per layer
        sizes = {t.name: t.n_elements for t in file.tensors}
        weights: Counter[GGMLQuantizationType] = Counter()
        n_layers = None if mtp_layers else n_layers_run(file)
        inputs: dict[tuple[int, str, int], Input] = {}
        n_expert_weights_used, expert_columns = 0, 0
        n_weights_used = float(sizes.get(OUTPUT, sizes.get(TOKEN_EMBD, 0)))
        factorizations: Counter[int] = Counter()
        for t in file.tensors:
            name = re.fullmatch(r"blk\.(\d+)\.(\w+|nextn\.(?:eh_proj|shared_head_head))\.weight", t.name)
            if not name or t.n_dims < 2:
                continue
            n_matrices = t.ne[2] if len(t.ne) > 2 else 1
            used = min(n_used, n_matrices) or n_matrices
            layer, stem = int(name[1]), name[2]
            if n_layers is not None and layer >= n_layers:
                continue
            key = layer, SHARED.get(stem, stem), t.ne[0]
            is_common = n_matrices > 1 and not has_own_inputs(t.name)
            before = inputs.get(key, Input(layer, t.ne[0], n_matrices, used, 0, is_common=is_common))
            inputs[key] = replace(before, n_tensors=before.n_tensors + 1, n_rows=before.n_rows + t.n_elements // t.ne[0])
            weights[t.type] += t.n_elements
            n_weights_used += t.n_elements * used / n_matrices
            if n_matrices > 1:
                n_expert_weights_used += t.n_elements * used // n_matrices
                expert_columns = max(1, N_COLUMNS * used // n_matrices)
            factorizations[t.ne[0]] += n_matrices * t.ne[0] ** 3 // 3
        most = weights.most_common(1)
        return cls(
            file.n_bytes, tuple(inputs.values()), int(n_weights_used), factorizations, most[0][0] if most else GGMLQuantizationType.F16,
            n_expert_weights_used=n_expert_weights_used, expert_columns=expert_columns,
        )

    @property
    def layers(self) -> list[int]:
        return sorted({i.layer for i in self.inputs})

    @property
    def widths(self) -> list[int]:
        """The numbers of columns of the inputs, the widest first."""
        return sorted({i.n_columns for i in self.inputs}, reverse=True)

    def full_limit(self, n_columns: int) -> int | None:
        """Return the `full_columns` that gives inputs of up to n_columns columns full Hessians; None if that is all inputs, or none."""
        return n_columns if 0 < n_columns < self.widths[0] else None

    @property
    def widest_full(self) -> int:
        """Columns of the widest input with a full Hessian."""
        return next((n for n in self.widths if self.full_columns is None or n <= self.full_columns), 0)

    def kind_for(self, n_columns: int, kind: str) -> str:
        """Return the kind of the Hessian of an input."""
        return kind_for(n_columns, kind, self.full_columns)

    def hessian_bytes(self, kind: str, layers: list[int] | None = None) -> int:
        return sum(i.n_bytes(self.kind_for(i.n_columns, kind)) for i in self.inputs if layers is None or i.layer in layers)

    def collection_bytes(self, kind: str, layers: list[int] | None = None) -> int:
        """Return the memory that collecting the Hessians of these layers takes, with the weights that are in use."""
        if self.by_layer:
            return self.n_bytes // len(self.layers) + COPIES * max(self.hessian_bytes(kind, [layer]) for layer in layers or self.layers)
        return self.n_bytes + self.hessian_bytes(kind, layers)

    def collection_flops(self, kind: str) -> float:
        """Return the operations per token that collecting the Hessians takes."""
        return sum(i.flops(self.kind_for(i.n_columns, kind)) for i in self.inputs)

    def seconds(self, kind: str, n_tokens: int, n_threads: int) -> float:
        """Estimate the time of one pass, in seconds."""
        return n_tokens * (self.run_seconds(n_threads) + self.collection_flops(kind) / self.rate(n_threads))

    def run_seconds(self, n_threads: int) -> float:
        """Estimate the time that running the model takes per token, in seconds. Products of experts are slower."""
        dense, experts = self.n_weights_used - self.n_expert_weights_used, self.n_expert_weights_used
        return 2.0 * (dense / self.rate(n_threads) + (experts / self.rate(n_threads, is_expert=True) if experts else 0))

    def rate(self, n_threads: int, *, is_expert: bool = False) -> float:
        """Return the operations per second of llama.cpp's matrix products; for large models they are measured."""
        measured = None if self.n_bytes < UNTIMED_BYTES else product_rate(int(self.type), n_threads, self.expert_columns if is_expert else N_COLUMNS, is_expert)
        return FLOPS_PER_THREAD * n_threads if measured is None else GRAPH_SHARE * measured

    def factorization_seconds(self, n_threads: int, n_compared_metrics: int) -> float:
        """Estimate an upper bound of the time of all factorizations on all threads, in seconds.

        n_compared_metrics: different factorizations of a Hessian (metric_name()) among the types that a target compares; 0 without a
        target. With a target, measuring the sensitivities takes one more, and so does encoding.
        """
        factorization = sum(flops for n, flops in self.factorizations.items() if n <= self.widest_full)
        return factorization / (FACTORIZATION_RATE * n_threads) * (2 + n_compared_metrics if n_compared_metrics else 1)

    def factorization_bytes(self, n_threads: int, n_compared_metrics: int) -> int:
        """Return the most memory of factorization: the widest full Hessian, with a target one per thread."""
        return FACTORIZATION_BYTES * self.widest_full**2 * (n_threads if n_compared_metrics else 1)


def choose_importance(cost: CalibrationCost, n_tokens: int, memory: float, n_threads: int, n_compared_metrics: int) -> tuple[int, str]:
    """Choose the inputs that get full Hessians: the widest that is affordable and all narrower ones. The others get block-diagonal ones.

    Args:
        cost: of the model.
        n_tokens: of the text.
        memory: limit in bytes.
        n_threads: that calibrate and factorize.
        n_compared_metrics: of CalibrationCost.factorization_seconds().

    Returns:
        The number of columns of that input, 0 for none, and what the next wider input lacks; "" if there is none.
    """
    lack = ""
    for n_columns in cost.widths:
        narrowed = replace(cost, full_columns=n_columns)
        if not (reason := find_lack(narrowed, n_tokens, memory, n_threads, n_compared_metrics)):
            return n_columns, lack
        lack = reason
    return 0, lack


def find_lack(cost: CalibrationCost, n_tokens: int, memory: float, n_threads: int, n_compared_metrics: int) -> str:
    """Describe what full Hessians lack, with the arguments of choose_importance(); "" if nothing. They need:

    - memory for the model and the Hessians, of one layer or of all, and later for their factorization;
    - ENOUGH_TOKENS tokens per column of the widest, else they may not generalize to other text;
    - collecting takes at most as long as running the model;
    - factorizing takes at most 15 minutes.
    """
    needed = max(cost.collection_bytes("full"), cost.factorization_bytes(n_threads, n_compared_metrics))
    factorization = cost.factorization_seconds(n_threads, n_compared_metrics)
    subject = f"full Hessians of {cost.widest_full:,} columns"
    if needed > memory:
        return f"{subject} need {needed / GIB:.1f} GiB, the limit is {memory / GIB:.1f} GiB"
    if n_tokens < ENOUGH_TOKENS * cost.widest_full:
        return f"{subject} need {ENOUGH_TOKENS * cost.widest_full:,} tokens"
    if cost.collection_flops("full") > 2.0 * cost.n_weights_used:
        return f"{subject} would more than double the time of calibration"
    if factorization > MAX_FACTORIZATION_SECONDS:
        return f"{subject} would take {factorization / 60:.0f} minutes to factorize"
    return ""


def split_layers(cost: CalibrationCost, layers: list[int], memory: float, kind: str) -> list[list[int]]:
    """Split layers into ranges whose Hessians of a kind fit into memory with the model. Raise UserError if full ones of a single layer do not."""
    passes: list[list[int]] = []
    for layer in layers:
        if passes and passes[-1][-1] == layer - 1 and cost.collection_bytes(kind, [*passes[-1], layer]) <= memory:
            passes[-1].append(layer)
            continue
        needed = cost.collection_bytes(kind, [layer])
        if needed > memory:
            block = cost.collection_bytes("block")
            raise UserError(
                f"--importance full: the model and the full Hessians of layer {layer} need {needed / GIB:.2f} GiB, "
                f"the limit is {memory / GIB:.2f} GiB; pass a larger --memory, or --importance block, which needs {block / GIB:.2f} GiB"
            )
        passes.append([layer])
    return passes
