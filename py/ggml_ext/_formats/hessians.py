"""Second moments of the inputs of weight matrices, E[x x^T], as llama-imatrix --moments adds them to an importance matrix.

Layout of the file's tensor OWNER.in_moments, float32 (n_matrices, n_values): the sums over tokens of x x^T as lower triangles,
row by row (row i holds columns 0..i). "block": of each block of 256 columns in turn, the last may be shorter; "full": one
triangle of all columns. Weight matrices with the same input, such as attn_q and attn_k, share one entry, that of their owner.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .gguf_file import GGUFFile, Tensor

BLOCK = 256  # columns whose moments lie together in a file of blocks
KIND, BLOCK_SIZE, WEIGHTS, OWNERS = (f"imatrix.moments{end}" for end in ("", ".block_size", ".tensors", ".inputs"))
VALUES, COUNTS = ".in_moments", ".moment_counts"

# What is added to the diagonal, as a part of its mean. Measured (two models, KL divergence): whole matrices 0.0593 with 0.03,
# 0.0603 with 0.01, 0.0651 with 0.1; blocks lose by more than 0.01. Below 16 tokens a column they fit the calibration text
# too well, and 0.1 holds on other text.
DAMPING = {"block": 0.01, "full": 0.03}
FEW_TOKENS, DAMPING_FEW = 16, 0.1  # a column
# llama.cpp's types, whose codes are decided column by column, fit the calibration text more closely. Reference model, KL divergence on 60
# chunks of a text of its own: Q2_K 0.0707, 0.0706, 0.0686, 0.0678 with 0.01, 0.03, 0.06, 0.1 and whole matrices, Q3_K 0.0155, 0.0153, 0.0155,
# 0.0151, Q4_K 0.00390, 0.00374, 0.00371, 0.00375; with blocks Q2_K 0.0728, 0.0740, 0.0738 with 0.003, 0.01, 0.03, Q3_K 0.0161, 0.0161, 0.0160.
STOCK_DAMPING = {"block": 0.01, "full": 0.1}
# Where targets are fitted to the same tokens. Reference model, KL divergence on 60 chunks of a text of its own, whole matrices: ITQ2_T 0.0498,
# 0.0460, 0.0448, 0.0454 with 0.01, 0.03, 0.1, 0.2, ITQ3_T 0.00958 and 0.00904 with 0.03 and 0.1; Q3_K 0.0110 and 0.0104 with 0.1 and 0.3; with
# blocks ITQ2_T 0.0500 and 0.0496 with 0.01 and 0.03.
FITTED_DAMPING = {"block": 0.03, "full": 0.1}
FITTED_STOCK_DAMPING = {"block": 0.03, "full": 0.3}
# With 2 tokens a column, whole matrices lose to the diagonal on other text; from 7 on they win.
TOO_FEW_TOKENS, ENOUGH_TOKENS = 2, 7
WIDEST_EXACT = 4096  # columns up to which all rows are weighed with whole matrices


def block_starts(n_columns: int) -> range:
    return range(0, n_columns, BLOCK)


def packed_size(n_columns: int, whole: bool) -> int:
    """Values of the triangles of one matrix."""
    sizes = [n_columns] if whole else [min(BLOCK, n_columns - start) for start in block_starts(n_columns)]
    return sum(n * (n + 1) // 2 for n in sizes)


def diagonal_indices(n_columns: int, whole: bool) -> np.ndarray:
    """Where the diagonal lies in the packed triangles, int64 (n_columns,)."""
    size = n_columns if whole else BLOCK
    column = np.arange(n_columns, dtype=np.int64)
    block, i = column // size, column % size
    return block * (size * (size + 1) // 2) + i * (i + 3) // 2


def extract_blocks(triangle: np.ndarray, n_columns: int) -> np.ndarray:
    """The triangles of the diagonal blocks, out of one of all columns: float32, packed_size(n_columns, False) values."""
    out, position = np.empty(packed_size(n_columns, False), np.float32), 0
    for start in block_starts(n_columns):
        for i in range(start, min(start + BLOCK, n_columns)):
            first, n = i * (i + 1) // 2 + start, i - start + 1
            out[position : position + n] = triangle[first : first + n]
            position += n
    return out


def quadratic_forms(triangles: np.ndarray, rows: np.ndarray, whole: bool) -> np.ndarray:
    """x^T H x of each row: float32 (n_rows, n_columns) to float64 (n_rows,). H: packed triangles, float32.

    Products are float32, in panels of 256 rows of H so that no square matrix is made; their sums are float64.
    """
    out, position = np.zeros(len(rows)), 0
    for start in block_starts(rows.shape[1]):
        stop = min(start + BLOCK, rows.shape[1])
        left = 0 if whole else start  # first column of the panel
        panel = np.zeros((stop - start, stop - left), np.float32)
        for i in range(start, stop):
            n = i - left + 1
            panel[i - start, :n] = triangles[position : position + n]
            position += n
        panel[:, : start - left] *= 2  # for the mirror image above the diagonal
        square = panel[:, start - left :]
        square += np.tril(square, -1).T
        out += np.einsum("ij,ij->i", rows[:, left:stop] @ panel.T, rows[:, start:stop], dtype=np.float64)
    return out


@dataclass(frozen=True)
class Stored:
    """Rows of a float32 tensor of a file, each read when it is asked for."""

    file: GGUFFile
    tensor: Tensor

    def __getitem__(self, row: int) -> np.ndarray:
        return self.file.rows(self.tensor, row, 1).view("<f4")[0]


@dataclass(frozen=True)
class TensorHessian:
    """The moments of one weight matrix, or of its experts, read from the file when asked for.

    An expert with fewer tokens t than the n columns that are decided together (256, or all with whole matrices) is blended
    with the mean over all experts: weight t / (t + n) for its own mean square, n / (t + n) for the layer's, so that one
    without tokens gets the layer's.
    """

    where: str  # begin of messages: file and tensor
    kind: str  # "block" or "full", as it is used; the file may hold more
    n_columns: int
    counts: np.ndarray  # float32 (n_matrices,), tokens
    stored: np.ndarray | Stored  # float32 (n_matrices, n_values)
    stored_full: bool
    is_fitted: bool = False  # weights are made for the same tokens
    _means: list[np.ndarray] = field(default_factory=list)  # one, once it is known
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_full(self) -> bool:
        return self.kind == "full"

    @property
    def n_matrices(self) -> int:
        return len(self.counts)

    @property
    def width(self) -> int:
        """Columns that are decided together."""
        return self.n_columns if self.is_full else min(BLOCK, self.n_columns)

    def is_blended(self, expert: int) -> bool:
        return self.n_matrices > 1 and self.counts[expert] < self.width

    def tokens(self, expert: int) -> float:
        """Tokens behind a matrix; of all experts together where it is blended with their mean."""
        return float(self.counts.sum() if self.is_blended(expert) else self.counts[expert])

    def damping(self, expert: int, of_stock: bool = False) -> float:
        """What to add to the diagonal, as a part of its mean. of_stock: for a type of llama.cpp."""
        if self.is_fitted:
            return (FITTED_STOCK_DAMPING if of_stock else FITTED_DAMPING)[self.kind]
        if self.tokens(expert) < FEW_TOKENS * self.width:
            return DAMPING_FEW
        return (STOCK_DAMPING if of_stock else DAMPING)[self.kind]

    def triangles(self, expert: int) -> np.ndarray:
        """Packed triangles, float32 (packed_size(n_columns, whole),), of any scale. UserError for values that no sum has."""
        if not self.is_blended(expert):
            return self._used(self._checked(expert))
        tokens, mean = np.float32(self.counts[expert]), self._mean()
        if tokens == 0:
            return mean
        share = tokens / (tokens + np.float32(self.width))
        return share / tokens * self._used(self._checked(expert)) + (1 - share) * mean

    def _mean(self) -> np.ndarray:
        """Per token of all experts."""
        with self._lock:
            if not self._means:
                total = np.zeros(packed_size(self.n_columns, self.is_full), np.float32)
                for expert in np.flatnonzero(self.counts):
                    total += self._used(self._checked(expert)) / np.float32(self.counts.sum())
                self._means.append(total)
            return self._means[0]

    def _used(self, values: np.ndarray) -> np.ndarray:
        """The part of a stored matrix that is used."""
        return extract_blocks(values, self.n_columns) if self.stored_full and not self.is_full else values

    def _checked(self, expert: int) -> np.ndarray:
        values = self.stored[expert]
        diagonal = values[diagonal_indices(self.n_columns, self.stored_full)]
        of_expert = f" of matrix {expert}" if self.n_matrices > 1 else ""
        way_out = "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        if (column := np.flatnonzero(~(diagonal >= 0))).size:
            raise UserError(
                f"{self.where}: the mean square of column {column[0]:,}{of_expert} is {diagonal[column[0]]:g}, must be finite and "
                f"not negative; {way_out}"
            )
        # a sum in float64 is finite where all values are: 1e9 float32 of up to 3e38 stay below 1e308
        if not np.isfinite(values.sum(dtype=np.float64)):
            i = np.flatnonzero(~np.isfinite(values))[0]
            raise UserError(f"{self.where}: value {i:,} of the moments{of_expert} is {values[i]:g}, must be finite; {way_out}")
        return values

    def check(self) -> None:
        """Reads all values. UserError as in triangles()."""
        for expert in range(self.n_matrices):
            self._checked(expert)

    def weighted_energies(self, triangles: np.ndarray, *rows: np.ndarray) -> list[float]:
        """Sum of w^T H w over the rows of each float32 (n_rows, n_columns). triangles: H, what triangles() gave for their expert.

        Whole matrices of more than 4096 columns are too slow for that: there every second row (third, ...) is taken and
        the sum scaled.
        """
        step = -(-self.n_columns // WIDEST_EXACT) if self.is_full else 1
        sample = [np.ascontiguousarray(r[::step]) for r in rows]
        forms = quadratic_forms(triangles, np.concatenate(sample), self.is_full).reshape(len(rows), -1)
        return (forms.sum(axis=1) * len(rows[0]) / len(sample[0])).tolist()


@dataclass(frozen=True)
class _Input:
    """An entry of a file: one input, whose moments several weight matrices may share."""

    file: GGUFFile
    values: Tensor
    counts: np.ndarray  # float32 (n_matrices,)
    is_full: bool


class HessianFile:
    """Second moments of GGUF importance matrices: of one file, or of several for different layers."""

    def __init__(self, files: Sequence[GGUFFile]):
        """Checks keys, sizes and counts; values when they are read. UserError for what no llama-imatrix writes."""
        self._inputs: dict[str, _Input] = {}  # by the name of the weight matrix
        self.path, self.files = files[0].path, files
        for file in files:
            self._add_file(file)
        self.kind = "full" if all(i.is_full for i in self._inputs.values()) else "block"

    @staticmethod
    def kind_in(file: GGUFFile) -> str | None:
        """"block" or "full", or None for a file without moments."""
        return file.value(KIND)

    def _add_file(self, file: GGUFFile) -> None:
        where, way_out = f"--imatrix: {file.path}", "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        kind, block_size = file.value(KIND), file.value(BLOCK_SIZE, BLOCK)
        if kind not in DAMPING:
            raise UserError(f"{where}: {KIND} is {kind!r}, must be block or full; {way_out}")
        if block_size != BLOCK:
            raise UserError(f"{where}: {BLOCK_SIZE} is {block_size}, must be {BLOCK}; {way_out}")
        names, owners = file.strings(WEIGHTS), file.strings(OWNERS)
        if names is None or owners is None or len(names) != len(owners) or not names:
            found = [f"{len(v):,} names" if v is not None else "missing" for v in (names, owners)]
            raise UserError(
                f"{where}: {WEIGHTS} ({found[0]}) and {OWNERS} ({found[1]}) must be lists of strings of the same length; {way_out}"
            )
        tensors = {t.name: t for t in file.tensors}
        inputs = {owner: self._input(file, owner, tensors, kind == "full") for owner in dict.fromkeys(owners)}
        self._inputs |= {name: inputs[owner] for name, owner in zip(names, owners, strict=True)}

    @staticmethod
    def _input(file: GGUFFile, owner: str, tensors: dict[str, Tensor], whole: bool) -> _Input:
        where, way_out = f"--imatrix: {file.path}: tensor {owner}", "make the file again with llama-imatrix -m MODEL -f TEXT --moments block"
        for name in (owner + VALUES, owner + COUNTS):
            if name not in tensors:
                raise UserError(f"{where}: {name} is not in the file, though {OWNERS} names it; {way_out}")
            if tensors[name].type != GGMLQuantizationType.F32:
                raise UserError(f"{where}: {name} is {tensors[name].type.name.lower()}, must be f32; {way_out}")
        values, count_tensor = tensors[owner + VALUES], tensors[owner + COUNTS]
        counts = file.rows(count_tensor, 0, count_tensor.n_rows).view("<f4").ravel()
        if len(counts) != values.n_rows:
            raise UserError(f"{where}: moments of {values.n_rows:,} matrices and counts of {len(counts):,}; {way_out}")
        if (bad := np.flatnonzero(~((counts >= 0) & (counts < np.inf)))).size:
            raise UserError(f"{where}: count {bad[0]:,} is {counts[bad[0]]:g}, must be finite and not negative; {way_out}")
        if not counts.any():
            raise UserError(f"{where}: its moments are of no token at all; make the file again with more text")
        return _Input(file, values, counts, whole)

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def names(self) -> list[str]:
        """Names of the weight matrices that have moments."""
        return list(self._inputs)

    def owner(self, name: str) -> str:
        """Name of the entry that a weight matrix has, alone or with others."""
        return self._inputs[name].values.name

    def for_tensor(self, tensor: Tensor, kind: str) -> TensorHessian:
        """Moments of a weight matrix of the model. UserError if they are for another width or number of experts."""
        found = self._inputs[tensor.name]
        n_columns, n_matrices = tensor.ne[0], tensor.ne[2] if len(tensor.ne) > 2 else 1
        where = f"--imatrix: {found.file.path}: tensor {tensor.name}"
        needed = packed_size(n_columns, found.is_full)
        if (found.values.ne[0], len(found.counts)) != (needed, n_matrices):
            raise UserError(
                f"{where} has moments of {found.values.ne[0]:,} values for {len(found.counts):,} matrices, the model needs "
                f"{needed:,} for {n_matrices:,} ({n_columns:,} columns): they are for another model; make them with "
                "llama-imatrix -m MODEL -f TEXT --moments block"
            )
        return TensorHessian(where, kind, n_columns, found.counts, Stored(found.file, found.values), found.is_full)


def token_warnings(moments: dict[str, TensorHessian]) -> list[str]:
    """One line for matrices with too few tokens, one for experts that are blended. moments: by name of the weight matrix."""
    few, blended = {}, {}
    for name, m in moments.items():
        if m.counts.sum() < TOO_FEW_TOKENS * m.width:
            few[name] = m
        if n := sum(map(m.is_blended, range(m.n_matrices))):
            blended[name] = n
    lines = []
    if few:
        name, m = next(iter(few.items()))
        lines.append(
            f"the moments of {len(few)} tensors, such as {name}, are of {m.counts.sum():,.0f} tokens for {m.width:,} columns; take at "
            f"least {FEW_TOKENS * m.width:,} tokens, or pass --importance {'block' if m.is_full else 'diagonal'}"
        )
    if blended:
        worst = max(blended, key=blended.get)
        lines.append(
            f"{sum(blended.values()):,} experts of {len(blended)} tensors saw fewer tokens than they have columns and get a blend "
            f"with the mean of their layer, most in {worst} ({blended[worst]} of {moments[worst].n_matrices})"
        )
    return lines
