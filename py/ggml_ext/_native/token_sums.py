"""Sums over tokens of products left^T right, on several threads: in BF16 if the CPU has its products (AVX512-BF16), else in float32."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from .._base.units import MIB
from .library import Library, load

ROWS = 128  # of a sum per thread; fixed, so that the bytes do not depend on the threads
BUFFER = 256 * MIB  # of packed tokens: a sum is read and written once for many of them
SAMPLE = 2048  # rows, columns and tokens of the sample of speed()


@dataclass(frozen=True)
class PackedTokens:
    """Vectors of some tokens, in the form of the products."""

    columns: int
    n_tokens: int
    data: np.ndarray  # for BF16 as in ggml-ext.h, else float32 (tokens, columns)


def bf16_library() -> Library | None:
    """Return the library if it and the CPU have products in BF16."""
    library = load()
    return library if library is not None and library.has_bf16_sums() else None


def pack(x: np.ndarray, *, is_transposed: bool = False) -> PackedTokens:
    """Copy vectors, float32 (tokens, columns), or (columns, tokens) if they are transposed."""
    library, (n_tokens, columns) = bf16_library(), x.shape[::-1] if is_transposed else x.shape
    if library:
        return PackedTokens(columns, n_tokens, library.pack_bf16(x, is_transposed))
    return PackedTokens(columns, n_tokens, np.array(x.T if is_transposed else x, np.float32))


@dataclass
class TokenSums:
    """Sums to which products are added. They are complete after flush().

    Attributes:
        pool: of the threads.
    """

    pool: ThreadPoolExecutor
    _products: dict[int, tuple[np.ndarray, list[tuple[PackedTokens, PackedTokens]]]] = field(default_factory=dict)  # by address of the sum
    _symmetric: dict[int, np.ndarray] = field(default_factory=dict)
    _n_bytes: int = 0

    def add(self, total: np.ndarray, left: PackedTokens, right: PackedTokens) -> None:
        """Add left^T right to total, float32 (columns of left, columns of right). If both are one object, compute one half of the product."""
        if not left.n_tokens:
            return
        address = total.ctypes.data  # callers may pass a new view of the same sum, which one thread alone has to write
        self._products.setdefault(address, (total, []))[1].append((left, right))
        if left is right:
            self._symmetric[address] = total
        self._n_bytes += left.data.nbytes + (0 if left is right else right.data.nbytes)
        if self._n_bytes > BUFFER:
            self._compute()

    def flush(self) -> None:
        """Compute the products that are left, and the other halves of symmetric sums."""
        self._compute()
        list(self.pool.map(_mirror, self._symmetric.values()))
        self._symmetric.clear()

    def _compute(self) -> None:
        jobs = [(total, products, first) for total, products in self._products.values() for first in range(0, len(total), ROWS)]
        self._products, self._n_bytes = {}, 0
        list(self.pool.map(lambda job: _add_rows(*job), jobs))


def _add_rows(total: np.ndarray, products: list[tuple[PackedTokens, PackedTokens]], first: int) -> None:
    """Add products to ROWS rows of a sum; to the upper triangle of a symmetric one."""
    library, stop = bf16_library(), first + ROWS
    for left, right in products:
        start = first if left is right else 0
        if library:
            library.add_bf16(total, left.data, right.data, left.n_tokens, first, min(stop, len(total)), start)
        else:
            total[first:stop, start:] += left.data[:, first:stop].T @ right.data[:, start:]


def _mirror(total: np.ndarray) -> None:
    """Copy the upper triangle to the lower one."""
    for first in range(0, len(total), ROWS):
        stop = first + ROWS
        total[stop:, first:stop] = total[first:stop, stop:].T


@functools.cache
def speed(n_threads: int) -> float:
    """Measure the operations per second of TokenSums, in about a tenth of a second. A multiplication and an addition are two operations."""
    packed, total = pack(np.ones((SAMPLE, SAMPLE), np.float32)), np.zeros((SAMPLE, SAMPLE), np.float32)
    with ThreadPoolExecutor(n_threads) as pool:
        sums = TokenSums(pool)
        sums.add(total, packed, replace(packed))  # not symmetric
        start = time.perf_counter()
        sums.flush()
        return 2 * SAMPLE**3 / (time.perf_counter() - start)
