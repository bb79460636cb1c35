"""Hessians H = X^T X of the inputs of weight matrices, which llama-imatrix --moments adds to an imatrix.

The tensor OWNER.in_moments, float32 (n_matrices, n_values), holds lower triangles of sums of x x^T over tokens, row by row (row i holds
columns 0..i). Kind "block": a triangle per block of 256 columns, the last may be smaller; kind "full": one triangle over all columns, except
for inputs wider than a limit (--moments-columns), which have blocks; the number of values tells.
Weight matrices with the same input, as attn_q and attn_k, share the entry of one of them, its owner.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .gguf_file import GGUFFile, Tensor
from .imatrix import SUMS

BLOCK = 256  # columns per block of a block-diagonal Hessian
KIND, BLOCK_SIZE, WEIGHTS, OWNERS = (f"imatrix.moments{end}" for end in ("", ".block_size", ".tensors", ".inputs"))
VALUES, COUNTS = ".in_moments", ".moment_counts"

# Strength of the shrinkage of a Hessian towards its diagonal: tokens per column at which the diagonal is doubled, without and with sequential
# quantization, and the least strength. The search is in docs/results/shrinkage.md.
SHRINKAGE, SEQUENTIAL_SHRINKAGE, LEAST_SHRINKAGE = 4, 8, 0.03
# Tokens per column from which on full Hessians are used: then they are better than block-diagonal ones, or equal (docs/results/calibration.md).
ENOUGH_TOKENS = 2
ADVISED_TOKENS = 16  # per column, in the warning of too few
WIDEST_EXACT = 1536  # columns up to which errors under a full Hessian include every row


def regularization(factor: float, least: float, columns: int, n_tokens: float) -> float:
    """Return how much to regularize sums over n_tokens tokens: factor * columns / n_tokens, from `least` to `factor`."""
    return max(least, factor * columns / max(n_tokens, columns))


def own_share(n_tokens: float, columns: int) -> float:
    """Return the weight of an expert's own sums in the blend with the mean of its layer."""
    return n_tokens / (n_tokens + columns)


def kind_for(n_columns: int, kind: str, full_columns: int | None) -> str:
    """Return the kind of the Hessian of an input, where those of more than full_columns columns are block-diagonal; None: no limit."""
    return "block" if kind == "full" and full_columns is not None and n_columns > full_columns else kind


def block_starts(n_columns: int) -> range:
    return range(0, n_columns, BLOCK)


def packed_size(n_columns: int, is_full: bool) -> int:
    """Return the number of values in the triangles of one Hessian."""
    sizes = [n_columns] if is_full else [min(BLOCK, n_columns - start) for start in block_starts(n_columns)]
    return sum(n * (n + 1) // 2 for n in sizes)


def diagonal_indices(n_columns: int, is_full: bool) -> np.ndarray:
    """Return the indices of the diagonal in the packed triangles, int64 (n_columns,)."""
    size = n_columns if is_full else BLOCK
    column = np.arange(n_columns, dtype=np.int64)
    block, i = column // size, column % size
    return block * (size * (size + 1) // 2) + i * (i + 3) // 2


def extract_blocks(triangle: np.ndarray, n_columns: int) -> np.ndarray:
    """Return the triangles of a full Hessian's diagonal blocks: float32 (packed_size(n_columns, False),)."""
    out, position = np.empty(packed_size(n_columns, False), np.float32), 0
    for start in block_starts(n_columns):
        for i in range(start, min(start + BLOCK, n_columns)):
            first, n = i * (i + 1) // 2 + start, i - start + 1
            out[position : position + n] = triangle[first : first + n]
            position += n
    return out


def pack_triangle(square: np.ndarray) -> np.ndarray:
    """Pack the lower triangle of a matrix, float32 (n, n), row by row."""
    out, position = np.empty(packed_size(len(square), True), np.float32), 0
    for i, row in enumerate(square):
        out[position : position + i + 1] = row[: i + 1]
        position += i + 1
    return out


def divide_columns(triangles: np.ndarray, factors: np.ndarray, is_full: bool) -> np.ndarray:
    """Return the Hessian of inputs x / s: H[i, j] / (s[i] s[j]), packed as H. factors: s, float32 (n_columns,)."""
    out, position, inverse = np.empty_like(triangles), 0, 1 / factors
    if is_full:
        for i in range(len(factors)):
            np.multiply(triangles[position : position + i + 1], inverse[: i + 1] * inverse[i], out=out[position : position + i + 1])
            position += i + 1
        return out
    for start in block_starts(len(factors)):
        part = inverse[start : start + BLOCK]
        n = packed_size(len(part), True)
        out[position : position + n] = triangles[position : position + n] * np.outer(part, part)[np.tril_indices(len(part))]
        position += n
    return out


def quadratic_forms(triangles: np.ndarray, rows: np.ndarray, is_full: bool) -> np.ndarray:
    """Compute x^T H x for each row x: float32 (n_rows, n_columns) to float64 (n_rows,). triangles: H, packed float32.

    Products are float32, over panels of 256 rows of H to save memory; their sums are float64.
    """
    out, position = np.zeros(len(rows)), 0
    for start in block_starts(rows.shape[1]):
        stop = min(start + BLOCK, rows.shape[1])
        first = 0 if is_full else start  # column of the panel
        panel = np.zeros((stop - start, stop - first), np.float32)
        for i in range(start, stop):
            n = i - first + 1
            panel[i - start, :n] = triangles[position : position + n]
            position += n
        panel[:, : start - first] *= 2  # the upper triangle counts too
        square = panel[:, start - first :]
        square += np.tril(square, -1).T
        out += np.einsum("ij,ij->i", rows[:, first:stop] @ panel.T, rows[:, start:stop], dtype=np.float64)
    return out


class Rows(Protocol):
    """Rows that are made on access."""

    def __getitem__(self, row: int, /) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredRows:
    """Rows of a float32 tensor, read from the file on access."""

    file: GGUFFile
    tensor: Tensor

    def __getitem__(self, row: int) -> np.ndarray:
        return self.file.rows(self.tensor, row, 1).view("<f4")[0]


@dataclass(frozen=True)
class TensorHessian:
    """The Hessian of one weight matrix, or those of its experts, read from the file on access.

    The Hessian of an expert that saw t tokens is blended with the mean over all experts, with the weights t / (t + n) and n / (t + n) for
    the n columns of a triangle (docs/results/calibration.md).

    Attributes:
        where: file and tensor, the start of messages.
        kind: "block" or "full". A file with full Hessians serves both.
        counts: tokens, float32 (n_matrices,).
        stored: sums, float32 (n_matrices, n_values).
        stored_full: the kind of `stored` is "full".
        factors: of column scales, float32 (n_columns,), which divide the inputs; None without them.
        strength: of the shrinkage: tokens per column at which the diagonal is doubled.
    """

    where: str
    kind: str
    n_columns: int
    counts: np.ndarray
    stored: np.ndarray | Rows
    stored_full: bool
    factors: np.ndarray | None = None
    strength: float = SHRINKAGE
    _means: list[np.ndarray] = field(default_factory=list)  # at most one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_full(self) -> bool:
        return self.kind == "full"

    @property
    def n_matrices(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        """Number of columns of a triangle."""
        return self.n_columns if self.is_full else min(BLOCK, self.n_columns)

    @property
    def n_short(self) -> int:
        """The number of experts that saw fewer tokens than they have columns."""
        return int(np.count_nonzero(self.counts < self.width)) if self.n_matrices > 1 else 0

    def shrinkage(self) -> float:
        """Return the multiple of diag(H) that the encoders add to H.

        The correlations in H overfit the calibration text, the more so the fewer tokens a column has. GPTQ (section 3.3, step 2) adds a
        multiple of the mean diagonal. That suits inputs of equal energies, but in real models a few columns have a hundred times the energy
        of the others, and their mean hides the others' correlations.
        """
        return regularization(self.strength, LEAST_SHRINKAGE, self.width, float(self.counts.sum()))

    def triangles(self, expert: int) -> np.ndarray:
        """Return the packed triangles of an expert in any scale: float32 (packed_size(n_columns, is_full),). UserError for invalid sums."""
        triangles = self._blended_triangles(expert)
        return triangles if self.factors is None else divide_columns(triangles, self.factors, self.is_full)

    def _blended_triangles(self, expert: int) -> np.ndarray:
        if self.n_matrices == 1:
            return self._select(self._read(expert))
        tokens, mean = float(self.counts[expert]), self._mean()
        if tokens == 0:
            return mean
        share = own_share(tokens, self.width)
        return np.float32(share / tokens) * self._select(self._read(expert)) + np.float32(1 - share) * mean

    def _mean(self) -> np.ndarray:
        """Return the mean over the tokens of all experts."""
        with self._lock:
            if not self._means:
                total = np.zeros(packed_size(self.n_columns, self.is_full), np.float32)
                for expert in np.flatnonzero(self.counts).tolist():
                    total += self._select(self._read(expert)) / np.float32(self.counts.sum())
                self._means.append(total)
            return self._means[0]

    def _select(self, values: np.ndarray) -> np.ndarray:
        """Return the triangles of `kind` out of stored ones."""
        return extract_blocks(values, self.n_columns) if self.stored_full and not self.is_full else values

    def _read(self, expert: int) -> np.ndarray:
        """Read and check the stored triangles."""
        values = self.stored[expert]
        diagonal = values[diagonal_indices(self.n_columns, self.stored_full)]
        of_expert = f" of matrix {expert}" if self.n_matrices > 1 else ""
        hint = "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        if (column := np.flatnonzero(~(diagonal >= 0))).size:
            raise UserError(
                f"{self.where}: diagonal value {column[0]:,} of the Hessian{of_expert} is {diagonal[column[0]]:g}, must be finite and "
                f"not negative; {hint}"
            )
        # a float64 sum of float32 values is finite only if all values are
        if not np.isfinite(values.sum(dtype=np.float64)):
            i = np.flatnonzero(~np.isfinite(values))[0]
            raise UserError(f"{self.where}: value {i:,} of the Hessian{of_expert} is {values[i]:g}, must be finite; {hint}")
        return values

    def check(self) -> None:
        """Check all values. UserError as in triangles()."""
        for expert in range(self.n_matrices):
            self._read(expert)

    def weighted_energies(self, triangles: np.ndarray, *rows: np.ndarray) -> list[float]:
        """Sum w^T H w over the rows of each array, float32 (n_rows, n_columns). triangles: H, the result of triangles().

        With a full Hessian of more than WIDEST_EXACT columns only every second row (third, ...) is evaluated, and the sum scaled.
        """
        step = -(-self.n_columns // WIDEST_EXACT) if self.is_full else 1
        sample = [np.ascontiguousarray(r[::step]) for r in rows]
        forms = quadratic_forms(triangles, np.concatenate(sample), self.is_full).reshape(len(rows), -1)
        return (forms.sum(axis=1) * len(rows[0]) / len(sample[0])).tolist()


@dataclass(frozen=True)
class _Entry:
    """An entry of a file, which weight matrices with the same input share.

    Attributes:
        counts: tokens, float32 (n_matrices,).
        n_columns: of the input; 0 if the file does not tell.
    """

    file: GGUFFile
    values: Tensor
    counts: np.ndarray
    n_columns: int
    is_full: bool


class HessianFile:
    """The Hessians in a GGUF imatrix, or in several for different layers."""

    def __init__(self, files: Sequence[GGUFFile]):
        """Check keys, sizes and counts; values are checked on access. UserError for invalid files."""
        self._entries: dict[str, _Entry] = {}  # by the name of the weight matrix
        self.path, self.files = files[0].path, files
        for file in files:
            self._add_file(file)
        self.kind = "full" if any(entry.is_full for entry in self._entries.values()) else "block"

    @staticmethod
    def kind_in(file: GGUFFile) -> str | None:
        """Return "block" or "full", or None for a file without Hessians."""
        return file.value(KIND)

    def _add_file(self, file: GGUFFile) -> None:
        where, hint = f"--imatrix: {file.path}", "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        kind, block_size = file.value(KIND), file.value(BLOCK_SIZE, BLOCK)
        if kind not in ("block", "full"):
            raise UserError(f"{where}: {KIND} is {kind!r}, must be block or full; {hint}")
        if block_size != BLOCK:
            raise UserError(f"{where}: {BLOCK_SIZE} is {block_size}, must be {BLOCK}; {hint}")
        names, owners = file.strings(WEIGHTS), file.strings(OWNERS)
        if names is None or owners is None or len(names) != len(owners) or not names:
            lengths = [f"{len(v):,} names" if v is not None else "missing" for v in (names, owners)]
            raise UserError(
                f"{where}: {WEIGHTS} ({lengths[0]}) and {OWNERS} ({lengths[1]}) must be lists of strings of the same length; {hint}"
            )
        tensors = {t.name: t for t in file.tensors}
        entries = {owner: self._read_entry(file, owner, tensors, kind == "full") for owner in dict.fromkeys(owners)}
        self._entries |= {name: entries[owner] for name, owner in zip(names, owners, strict=True)}

    @staticmethod
    def _read_entry(file: GGUFFile, owner: str, tensors: dict[str, Tensor], is_full: bool) -> _Entry:
        where, hint = f"--imatrix: {file.path}: tensor {owner}", "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        for name in (owner + VALUES, owner + COUNTS):
            if name not in tensors:
                raise UserError(f"{where}: {name} is not in the file, though {OWNERS} names it; {hint}")
            if tensors[name].type != GGMLQuantizationType.F32:
                raise UserError(f"{where}: {name} is {tensors[name].type.name.lower()}, must be f32; {hint}")
        values, count_tensor = tensors[owner + VALUES], tensors[owner + COUNTS]
        counts = file.rows(count_tensor, 0, count_tensor.n_rows).view("<f4").ravel()
        if len(counts) != values.n_rows:
            raise UserError(f"{where}: Hessians of {values.n_rows:,} matrices and counts of {len(counts):,}; {hint}")
        if (bad := np.flatnonzero(~((counts >= 0) & (counts < np.inf)))).size:
            raise UserError(f"{where}: count {bad[0]:,} is {counts[bad[0]]:g}, must be finite and not negative; {hint}")
        if not counts.any():
            raise UserError(f"{where}: its Hessian has no tokens; make the file again with more text")
        n_columns = tensors[owner + SUMS].ne[0] if owner + SUMS in tensors else 0
        is_blocks = n_columns > BLOCK and values.ne[0] == packed_size(n_columns, False)
        return _Entry(file, values, counts, n_columns, is_full and not is_blocks)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Return the names of the weight matrices that have a Hessian."""
        return list(self._entries)

    def entry_name(self, name: str) -> str:
        """Return the name of the tensor in the file; weight matrices with the same input share it."""
        return self._entries[name].values.name

    def for_tensor(self, tensor: Tensor, kind: str) -> TensorHessian:
        """Return the Hessian for a tensor, of `kind` if it is stored so. UserError if it has another width or number of experts."""
        entry = self._entries[tensor.name]
        n_columns, n_matrices = tensor.ne[0], tensor.ne[2] if len(tensor.ne) > 2 else 1
        where = f"--imatrix: {entry.file.path}: tensor {tensor.name}"
        needed = packed_size(n_columns, entry.is_full)
        if (entry.values.ne[0], len(entry.counts)) != (needed, n_matrices):
            raise UserError(
                f"{where} has Hessians of {entry.values.ne[0]:,} values for {len(entry.counts):,} matrices, the model needs "
                f"{needed:,} for {n_matrices:,} ({n_columns:,} columns): the file is for another model; make one with "
                "llama-imatrix -m MODEL -f TEXT --moments block"
            )
        kind = kind if entry.is_full else "block"
        return TensorHessian(where, kind, n_columns, entry.counts, StoredRows(entry.file, entry.values), stored_full=entry.is_full)

    @property
    def n_tokens(self) -> int:
        """The tokens of the calibration, if an input sees all of them; else 0."""
        return int(max((entry.counts[0] for entry in self._entries.values() if len(entry.counts) == 1), default=0))

    @property
    def are_full(self) -> bool:
        """Whether all Hessians are full."""
        return all(entry.is_full for entry in self._entries.values())

    @property
    def full_columns(self) -> int | None:
        """The most columns of an input with a full Hessian, if others have block-diagonal ones; else None."""
        if self.kind == "block" or self.are_full:
            return None
        return max(entry.n_columns for entry in self._entries.values() if entry.is_full)


@dataclass(frozen=True)
class HessianUse:
    """The Hessian that matrices are encoded under: its columns, those of the matrix, and tokens (of the median expert).

    n_experts: 1 for other matrices; fewest: tokens of the expert with the fewest; n_unseen: experts without tokens.
    """

    width: int
    n_columns: int
    tokens: float
    n_experts: int = 1
    fewest: float = 0
    n_unseen: int = 0

    @classmethod
    def of(cls, hessian: TensorHessian) -> HessianUse:
        counts = hessian.counts
        return cls(hessian.width, hessian.n_columns, float(np.median(counts)), len(counts), float(counts.min()), int(np.count_nonzero(counts == 0)))

    @property
    def is_full(self) -> bool:
        return self.width == self.n_columns

    @property
    def tokens_per_column(self) -> float:
        return self.tokens / self.width


def token_warnings(hessians: dict[str, TensorHessian]) -> list[str]:
    """Return a warning for matrices with too few tokens and one for experts with few tokens. hessians: by name of the weight matrix."""
    few: dict[str, TensorHessian] = {}
    n_short: dict[str, int] = {}
    for name, hessian in hessians.items():
        if hessian.counts.sum() < ENOUGH_TOKENS * hessian.width:
            few[name] = hessian
        if hessian.n_short:
            n_short[name] = hessian.n_short
    lines = []
    if few:
        name, hessian = next(iter(few.items()))
        lines.append(
            f"the Hessians of {len(few)} tensors, such as {name}, have {hessian.counts.sum():,.0f} tokens for {hessian.width:,} columns; use at "
            f"least {ADVISED_TOKENS * hessian.width:,} tokens, or pass --importance {'block' if hessian.is_full else 'diagonal'}"
        )
    if n_short:
        worst = max(n_short, key=lambda name: n_short[name])
        lines.append(
            f"{sum(n_short.values()):,} experts of {len(n_short)} tensors saw fewer tokens than they have columns and get mostly the mean "
            f"of their layer, most in {worst} ({n_short[worst]} of {hessians[worst].n_matrices})"
        )
    return lines
