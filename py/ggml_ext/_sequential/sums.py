"""Sums over tokens: the statistics that sequential quantization corrects weights with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .._base.errors import UserError
from .._base.products import add_product
from .._formats.column_scales import ColumnScales
from .._formats.hessians import TensorHessian, own_share, pack_triangle
from .._native.streams import FLAG, HINT, ChunkArrays, ProductGroup, dense_products

# First positions, left out of the row statistics: all others attend to them, so they dominate the gradients.
SINKS = 1


class RowSums:
    """Row statistics G of the dense matrices of a layer.

    G is the sum of u u^T over tokens, with u = g/|g| for the gradient g at the outputs: lengths would give a few tokens all the weight. The
    first positions of chunks are left out.

    Attributes:
        g: by matrix, G of each `together` consecutive rows, float32 (rows, rows).
        n_tokens: by matrix, the number of tokens with a gradient.
    """

    def __init__(self, groups: Sequence[ProductGroup], together: int, scales: ColumnScales | None = None):
        self._together, self._scales = together, scales or ColumnScales()
        self.g = {p.weight: [np.zeros((n, n), np.float32) for _, n in self._parts(p.rows)] for p in dense_products(groups)}
        self.n_tokens = dict.fromkeys(self.g, 0)

    def _parts(self, n_rows: int) -> list[tuple[int, int]]:
        return [(first, min(self._together, n_rows - first)) for first in range(0, n_rows, self._together)]

    def add(self, gradients: dict[str, np.ndarray], pool: ThreadPoolExecutor) -> None:
        """Add the gradients of a chunk, float32 (tokens, rows). Raise UserError if they are not finite."""
        jobs = []
        for name, totals in self.g.items():
            directions = gradients[name][SINKS:]
            if (divisors := self._scales.row_divisors(name)) is not None:
                directions = directions * divisors
            lengths = np.linalg.norm(directions, axis=1, keepdims=True)
            if not np.isfinite(lengths).all():
                raise UserError(f"{FLAG}: the gradients at the outputs of {name} are not finite; {HINT}")
            directions = np.divide(directions, lengths, out=np.zeros_like(directions), where=lengths > 0)
            self.n_tokens[name] += int(np.count_nonzero(lengths))
            parts = [directions[:, first : first + n] for first, n in self._parts(directions.shape[1])]
            jobs += [(total, part, part) for total, part in zip(totals, parts, strict=True)]
        add_product(jobs, pool)


@dataclass
class Sums:
    """Sums H, D and R (_encode/correction.py) of the products with one input: H and D by expert, R by tensor."""

    group: ProductGroup
    factors: np.ndarray | None = None  # of column scales, float32 (columns,), which the quantized model's inputs are divided by
    h: np.ndarray = field(init=False)  # float32 (experts or 1, columns, columns)
    d: np.ndarray = field(init=False)  # float32 (experts or 1, columns, columns)
    r: dict[str, np.ndarray] = field(init=False)  # by tensor, float32 (rows, columns)
    counts: np.ndarray = field(init=False)  # tokens of each expert; without experts, of all

    def __post_init__(self) -> None:
        n, columns = max(1, self.group.experts), self.group.columns
        self.h, self.d = (np.zeros((n, columns, columns), np.float32) for _ in range(2))
        self.r = {p.weight: np.zeros((p.rows, columns), np.float32) for p in self.group.products if p.scale}
        self.counts = np.zeros(n, np.float32)

    def add(self, arrays: ChunkArrays, pool: ThreadPoolExecutor) -> None:
        """Add the inputs of a chunk."""
        if self.factors is not None:
            arrays = replace(arrays, x=(arrays.x[0] / self.factors, arrays.x[1]))
        if self.group.experts:
            for expert in range(self.group.experts):
                self._add(expert, *self._routed(arrays, expert), {}, pool)
            return
        residual_errors = {name: r - r_hat for name, (r, r_hat) in arrays.residuals.items()}
        self._add(0, arrays.x[0] - arrays.x[1], arrays.x[1], residual_errors, pool)

    def _routed(self, arrays: ChunkArrays, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x - x^ and x^ of the tokens of an expert in the quantized model.

        The difference is 0 for a token that the original model does not send to the expert, if experts have inputs of their own.
        """
        assert arrays.ids is not None
        original_ids, ids = arrays.ids
        token, slot = np.nonzero(ids == expert)
        x, x_hat = (a.reshape(len(ids), -1, self.group.columns) for a in arrays.x)
        if x.shape[1] == 1:  # all experts of a token have the same input
            return x[token, 0] - x_hat[token, 0], x_hat[token, 0]
        is_same = original_ids[token] == expert  # (tokens of the expert, used)
        difference = x[token, is_same.argmax(axis=1)] - x_hat[token, slot]
        return np.where(is_same.any(axis=1)[:, None], difference, 0), x_hat[token, slot]

    def _add(
        self, i: int, input_error: np.ndarray, x_hat: np.ndarray, residual_errors: dict[str, np.ndarray], pool: ThreadPoolExecutor
    ) -> None:
        jobs = [(self.h[i], x_hat), (self.d[i], input_error), *((self.r[name], error) for name, error in residual_errors.items())]
        add_product(((total, left, x_hat) for total, left in jobs), pool)
        self.counts[i] += len(x_hat)

    def hessian(self, where: str, kind: str) -> TensorHessian:
        """Return H for the encoders. where: its name in messages."""
        columns = self.group.columns
        packed = np.stack([pack_triangle(h) for h in self.h])
        return TensorHessian(where, kind, columns, self.counts, packed, stored_full=True)

    def expert_sums(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return H and D of an expert, blended with the mean as in TensorHessian; expert 0 without experts."""
        if len(self.h) == 1:
            return self.h[expert], self.d[expert]
        tokens = float(self.counts[expert])
        share = own_share(tokens, self.group.columns)
        own = share / max(tokens, 1)
        rest = (1 - share) / max(float(self.counts.sum()), 1)
        return tuple(own * a[expert] + rest * total for a, total in zip((self.h, self.d), self._totals, strict=True))

    @cached_property
    def _totals(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of H and D over all experts."""
        return self.h.sum(axis=0), self.d.sum(axis=0)
