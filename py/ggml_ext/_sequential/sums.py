"""Sums over tokens: the statistics that sequential quantization corrects weights with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from .._base.errors import UserError
from .._formats.column_scales import ColumnScales
from .._formats.hessians import SEQUENTIAL_SHRINKAGE, TensorHessian, own_share, pack_triangle
from .._native.streams import FLAG, HINT, ChunkArrays, ProductGroup, WeightProduct, dense_products
from .._native.token_sums import PackedTokens, TokenSums, pack

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

    def __init__(self, groups: Sequence[ProductGroup], together: int, pool: ThreadPoolExecutor, scales: ColumnScales | None = None):
        self._together, self._scales, self._sums = together, scales or ColumnScales(), TokenSums(pool)
        self.g = {p.weight: [np.zeros((n, n), np.float32) for _, n in self._parts(p.rows)] for p in dense_products(groups)}
        self.n_tokens = dict.fromkeys(self.g, 0)

    def _parts(self, n_rows: int) -> list[tuple[int, int]]:
        return [(first, min(self._together, n_rows - first)) for first in range(0, n_rows, self._together)]

    def add(self, gradients: dict[str, np.ndarray]) -> None:
        """Add the gradients of a chunk, float32 (tokens, rows). Raise UserError if they are not finite."""
        for name, totals in self.g.items():
            directions = gradients[name][SINKS:]
            if (divisors := self._scales.row_divisors(name)) is not None:
                directions = directions * divisors
            lengths = np.linalg.norm(directions, axis=1, keepdims=True)
            if not np.isfinite(lengths).all():
                raise UserError(f"{FLAG}: the gradients at the outputs of {name} are not finite; {HINT}")
            directions = np.divide(directions, lengths, out=np.zeros_like(directions), where=lengths > 0)
            self.n_tokens[name] += int(np.count_nonzero(lengths))
            for total, (first, n) in zip(totals, self._parts(directions.shape[1]), strict=True):
                part = pack(directions[:, first : first + n])
                self._sums.add(total, part, part)

    def flush(self) -> None:
        """Complete the sums."""
        self._sums.flush()


@dataclass
class StoredRowSums:
    """The row statistics G of all layers in a file, in half precision.

    Attributes:
        path: of the file, in an existing directory.
    """

    path: Path
    _places: dict[int, dict[str, list[tuple[int, int]]]] = field(default_factory=dict)  # by layer and matrix: offsets and rows of G
    _n_tokens: dict[str, int] = field(default_factory=dict)  # by matrix

    def write(self, layer: int, sums: RowSums) -> None:
        """Add a layer. OSError if there is no room."""
        places = self._places.setdefault(layer, {})
        self._n_tokens |= sums.n_tokens
        with open(self.path, "ab") as file:
            for name, parts in sums.g.items():
                for g in parts:
                    places.setdefault(name, []).append((file.tell(), len(g)))
                    mean = float(np.trace(g)) / len(g) or 1.0  # the scale of G does not matter
                    (g / np.float32(mean)).astype(np.float16).tofile(file)

    def read(self, layer: int) -> Iterator[tuple[str, list[np.ndarray], int]]:
        """Yield each matrix of a layer, G of consecutive rows, float32 (rows, rows), and the tokens in it."""
        for name, places in self._places.get(layer, {}).items():
            parts = [np.fromfile(self.path, np.float16, n * n, offset=offset).reshape(n, n).astype(np.float32) for offset, n in places]
            yield name, parts, self._n_tokens[name]


@dataclass(frozen=True)
class PackedRows:
    """Sums that are packed to the triangles of TensorHessian on access: packed copies of all would take half as much memory again."""

    squares: np.ndarray  # float32 (matrices, columns, columns)

    def __getitem__(self, row: int) -> np.ndarray:
        return pack_triangle(self.squares[row])


@dataclass
class Sums:
    """Sums H, D and R (_encode/correction.py) of the products with one input: H and D by expert, R by tensor. flush() completes them.

    The experts of a token may see the same input, as in ffn_gate and ffn_up. They then can have common sums, over all tokens.
    """

    group: ProductGroup
    pool: ThreadPoolExecutor
    factors: np.ndarray | None = None  # of column scales, float32 (columns,), which the quantized model's inputs are divided by
    weights: np.ndarray | None = None  # of sole_narrow_product(): R then includes scale * W D, and there is no D
    are_common: bool = False  # experts have common sums
    h: np.ndarray = field(init=False)  # float32 (experts with own sums or 1, columns, columns)
    d: np.ndarray | None = field(init=False)  # as h
    r: dict[str, np.ndarray] = field(init=False)  # by tensor, float32 (rows, columns)
    counts: np.ndarray = field(init=False)  # tokens of each of the sums
    _sums: TokenSums = field(init=False)
    _packed_weights: PackedTokens | None = field(init=False)  # of `weights`, transposed

    def __post_init__(self) -> None:
        n, columns = 1 if self.are_common else max(1, self.group.experts), self.group.columns
        self.h = np.zeros((n, columns, columns), np.float32)
        self.d = np.zeros_like(self.h) if self.weights is None else None
        self.r = {p.weight: np.zeros((p.rows, columns), np.float32) for p in self.group.products if p.scale}
        self.counts = np.zeros(n, np.float32)
        self._sums = TokenSums(self.pool)
        self._packed_weights = None if self.weights is None else pack(self.weights, is_transposed=True)

    def add(self, arrays: ChunkArrays) -> None:
        """Add the inputs of a chunk."""
        if self.factors is not None:
            arrays = replace(arrays, x=(arrays.x[0] / self.factors, arrays.x[1]))
        if self.group.experts and not self.are_common:
            for expert in range(self.group.experts):
                self._add(expert, *self._routed(arrays, expert), {})
            return
        residual_errors = {name: r - r_hat for name, (r, r_hat) in arrays.residuals.items()}
        self._add(0, arrays.x[0] - arrays.x[1], arrays.x[1], residual_errors)

    def flush(self) -> None:
        """Complete the sums."""
        self._sums.flush()

    def _routed(self, arrays: ChunkArrays, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x - x^ and x^ of the tokens of an expert in the quantized model.

        The difference is 0 for a token that the original model does not send to the expert, if experts have inputs of their own.
        """
        assert arrays.ids is not None
        original_ids, ids = arrays.ids
        token, slot = np.nonzero(ids == expert)
        x, x_hat = (a.reshape(len(ids), -1, self.group.columns) for a in arrays.x)
        if self.group.shares_inputs(len(ids)):
            return x[token, 0] - x_hat[token, 0], x_hat[token, 0]
        is_same = original_ids[token] == expert  # (tokens of the expert, used)
        difference = x[token, is_same.argmax(axis=1)] - x_hat[token, slot]
        return np.where(is_same.any(axis=1)[:, None], difference, 0), x_hat[token, slot]

    def _add(self, i: int, input_error: np.ndarray, x_hat: np.ndarray, residual_errors: dict[str, np.ndarray]) -> None:
        right = pack(x_hat)
        self._sums.add(self.h[i], right, right)
        if self.d is not None:
            self._sums.add(self.d[i], pack(input_error), right)
        for name, error in residual_errors.items():
            if self._packed_weights is not None:
                error = error + self.group.products[0].scale * self._multiply(input_error)
            self._sums.add(self.r[name], pack(error), right)
        self.counts[i] += len(x_hat)

    def _multiply(self, x: np.ndarray) -> np.ndarray:
        """Return x W^T, float32 (tokens, rows)."""
        assert self._packed_weights is not None
        out, sums = np.zeros((len(x), self._packed_weights.columns), np.float32), TokenSums(self.pool)
        sums.add(out, pack(x, is_transposed=True), self._packed_weights)
        sums.flush()
        return out

    def hessian(self, where: str, kind: str) -> TensorHessian:
        """Return H for the encoders. where: its name in messages."""
        packed = PackedRows(self.h) if self.group.experts else pack_triangle(self.h[0])[None]
        return TensorHessian(where, kind, self.group.columns, self.counts, packed, stored_full=True, strength=SEQUENTIAL_SHRINKAGE)

    def expert_sums(self, expert: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return H and D of an expert, blended with the mean as in TensorHessian; expert 0 if there are no other sums."""
        if self.d is None or len(self.h) == 1:
            return self.h[expert], None if self.d is None else self.d[expert]
        tokens = float(self.counts[expert])
        share = own_share(tokens, self.group.columns)
        own = share / max(tokens, 1)
        rest = (1 - share) / max(float(self.counts.sum()), 1)
        h, d = (own * a[expert] + rest * total for a, total in zip((self.h, self.d), self._totals, strict=True))
        return h, d

    def prepare_blend(self) -> None:
        """Compute what expert_sums() needs of all H and D, of which D may then be overwritten one by one."""
        if len(self.h) > 1:
            self._totals  # noqa: B018  cached

    @cached_property
    def _totals(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of H and D over all experts."""
        assert self.d is not None
        return self.h.sum(axis=0), self.d.sum(axis=0)

    def residual_sums(self, product: WeightProduct) -> np.ndarray | None:
        """Return R of _encode/correction.py, float32 (rows, columns), or None. With `weights` it includes W D."""
        return self.r[product.weight] / np.float32(product.scale) if product.weight in self.r else None


def sole_narrow_product(group: ProductGroup) -> WeightProduct | None:
    """Return the group's product if W D + R can be summed in fewer operations than D: W (x - x^) + r - r^ per token; else None.

    It is the only product with that input, is added to the residual stream, and has fewer rows than columns.
    """
    product = group.products[0]
    is_narrow = len(group.products) == 1 and not group.experts and product.scale and product.rows < group.columns
    return product if is_narrow else None
