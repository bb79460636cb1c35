"""Sums over tokens of the products of inputs, which targets are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .._base.errors import UserError
from .._formats.hessians import TensorHessian, packed_size
from .._native.streams import FLAG, WAY_OUT, ChunkArrays, ProductGroup, dense_products

# First positions, to which all others attend: they have up to 92 % of the energy of the gradients of attn_v in SmolLM2-135M-Instruct, and
# inputs of their own.
SINKS = 1
PANEL = 256  # columns whose sums one thread computes; bytes do not depend on how many there are


def add_product(jobs: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], pool: ThreadPoolExecutor) -> None:
    """total += left^T right for each (total, left, right)."""

    def panel(job: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
        total, left, right, first = job
        total[first : first + PANEL] += left[:, first : first + PANEL].T @ right

    list(pool.map(panel, [(*job, first) for job in jobs for first in range(0, len(job[0]), PANEL)]))


class RowSums:
    """Of the plain matrices of a layer, by name: E[u u^T] of the directions u = g/|g| of the gradients g at their outputs, times tokens,
    float32, of each `together` rows that know of each other, one after the other. Lengths differ so much between tokens that a few would
    decide. n_tokens: by name, of the tokens with a gradient. The first positions of chunks are left out."""

    def __init__(self, groups: Sequence[ProductGroup], together: int):
        self._together = together
        self.g = {p.weight: [np.zeros((n, n), np.float32) for _, n in self._parts(p.rows)] for p in dense_products(groups)}
        self.n_tokens = dict.fromkeys(self.g, 0)

    def _parts(self, n_rows: int) -> list[tuple[int, int]]:
        return [(first, min(self._together, n_rows - first)) for first in range(0, n_rows, self._together)]

    def add(self, gradients: dict[str, np.ndarray], pool: ThreadPoolExecutor) -> None:
        """A chunk; arrays float32 (tokens, rows). UserError where they are not finite."""
        jobs = []
        for name, totals in self.g.items():
            found = gradients[name][SINKS:]
            lengths = np.linalg.norm(found, axis=1, keepdims=True)
            if not np.isfinite(lengths).all():
                raise UserError(f"{FLAG}the gradients at the outputs of {name} are not finite; {WAY_OUT}")
            found = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
            self.n_tokens[name] += int(np.count_nonzero(lengths))
            parts = [found[:, first : first + n] for first, n in self._parts(found.shape[1])]
            jobs += [(total, part, part) for total, part in zip(totals, parts, strict=True)]
        add_product(jobs, pool)


@dataclass
class Sums:
    """Of a group, by matrix: H, D float32 (matrices, columns, columns) and R float32 (rows, columns), as targets.py names them, times
    tokens. counts: of these."""

    group: ProductGroup
    h: np.ndarray = field(init=False)
    d: np.ndarray = field(init=False)
    r: dict[str, np.ndarray] = field(init=False)
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        n, columns = max(1, self.group.experts), self.group.columns
        self.h, self.d = (np.zeros((n, columns, columns), np.float32) for _ in range(2))
        self.r = {p.weight: np.zeros((p.rows, columns), np.float32) for p in self.group.products if p.scale}
        self.counts = np.zeros(n, np.float32)

    def add(self, arrays: ChunkArrays, pool: ThreadPoolExecutor) -> None:
        """A chunk."""
        if self.group.experts:
            for expert in range(self.group.experts):
                self._add(expert, *self._routed(arrays, expert), {}, pool)
            return
        missing = {name: r - r_made for name, (r, r_made) in arrays.residuals.items()}
        self._add(0, arrays.x[0] - arrays.x[1], arrays.x[1], missing, pool)

    def _routed(self, arrays: ChunkArrays, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """x - x^ and x^ of the tokens that an expert gets in the model that is made. Where the original model sends one elsewhere, and
        each expert has an input of its own, there is no x to compare with, and the difference is 0."""
        assert arrays.ids is not None
        original_ids, ids = arrays.ids
        token, slot = np.nonzero(ids == expert)
        x, x_hat = (a.reshape(len(ids), -1, self.group.columns) for a in arrays.x)
        if x.shape[1] == 1:  # all experts of a token have the same input
            return x[token, 0] - x_hat[token, 0], x_hat[token, 0]
        is_same = original_ids[token] == expert  # (tokens of the expert, used)
        difference = x[token, is_same.argmax(axis=1)] - x_hat[token, slot]
        return np.where(is_same.any(axis=1)[:, None], difference, 0), x_hat[token, slot]

    def _add(self, i: int, missing: np.ndarray, x: np.ndarray, residuals: dict[str, np.ndarray], pool: ThreadPoolExecutor) -> None:
        jobs = [(self.h[i], x), (self.d[i], missing), *((self.r[name], rest) for name, rest in residuals.items())]
        add_product(((total, left, x) for total, left in jobs), pool)
        self.counts[i] += len(x)

    def moments(self, where: str, kind: str) -> TensorHessian:
        """H as the encoders take it."""
        columns = self.group.columns
        packed = np.empty((len(self.h), packed_size(columns, True)), np.float32)
        for i in range(columns):
            packed[:, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2] = self.h[:, i, : i + 1]
        return TensorHessian(where, kind, columns, self.counts, packed, stored_full=True, is_fitted=True)

    def of_expert(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """H and D of a matrix, blended with the mean of all as in TensorHessian where its tokens are fewer than its columns."""
        tokens, columns = float(self.counts[expert]), self.group.columns
        if len(self.h) == 1 or tokens >= columns:
            return self.h[expert], self.d[expert]
        share = tokens / (tokens + columns)
        own = share / max(tokens, 1)
        rest = (1 - share) / max(float(self.counts.sum()), 1)
        return tuple(own * a[expert] + rest * total for a, total in zip((self.h, self.d), self._totals, strict=True))

    @cached_property
    def _totals(self) -> tuple[np.ndarray, np.ndarray]:
        """H and D of all matrices, once everything is added."""
        return self.h.sum(axis=0), self.d.sum(axis=0)
