"""Importance matrices of llama-imatrix: for every column of a weight matrix the mean square of what it is multiplied with.

Source of formats and normalisation: llama.cpp, common/imatrix-loader.cpp and load_imatrix() of tools/quantize/quantize.cpp; of
the old format, which knows no tokens of experts, save_imatrix_legacy() of tools/imatrix/imatrix.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.file_reader import FileReader
from .gguf_file import MAX_NAME, GGUFFile, KeyValue, Tensor, has_magic, string_value, uint32_value

SUMS, COUNTS = ".in_sum2", ".counts"
# Mean squares of activations stay below 1e9. ggml's encoders sum products of importances and squared weights, and square
# the sums, in float32: far above this they overflow, and some abort.
LARGEST = 1e15
KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
# A column whose importance is below DEAD of the mean of its BLOCK counts with FLOOR of it: docs/results/calibration.md. llama.cpp's encoders
# erase what has no importance at all, and nothing with 1e-8.
BLOCK = 256
DEAD, FLOOR = 1e-8, 0.1


class ImportanceMatrix:
    """A GGUF importance matrix or an old one (.dat). Values are normalised when asked for."""

    def __init__(self, path: Path):
        """Opens and checks the whole file. UserError if it is no importance matrix or holds what none can hold."""
        self.path = path
        self.is_old = path.is_file() and not has_magic(path)
        self._entries: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # sums, float32 (n,), and tokens of each matrix
        self.excluded: frozenset[str] = frozenset()  # names of entries that are not used
        self._datasets: list[str] | None = None
        self._n_chunks = None
        if self.is_old:
            self._read_old()
        else:
            self._read_gguf()
        for name in self._entries:
            self._check_entry(name)
        if not any(sums.any() for sums, _ in self._entries.values()):
            raise UserError(
                f"--imatrix: {path} holds nothing but zeros, with which all weights are worth the same: make it again with "
                "llama-imatrix -m MODEL -f TEXT"
            )

    def _read_gguf(self) -> None:
        path, file = self.path, GGUFFile(self.path)
        tensors = {t.name: t for t in file.tensors}
        names = [n.removesuffix(SUMS) for n in tensors if n.endswith(SUMS)]
        if not names:
            raise UserError(
                f"--imatrix: {path} holds no importance matrix: it has no tensor named *{SUMS}; make one with llama-imatrix -m MODEL -f TEXT"
            )
        for key in KEYS:
            if key not in file.metadata:
                raise UserError(f"--imatrix: {path} has no key {key}: make the file again with llama-imatrix -m MODEL -f TEXT")
        for name in names:
            self._add_entry(file, name, tensors[name + SUMS], tensors.get(name + COUNTS))
        self._datasets, self._n_chunks = file.strings(KEYS[0]), file.value(KEYS[1])

    def _read_old(self) -> None:
        """The number of entries; of each the length of its name, the name, calls, the number of sums, and those; then, perhaps,
        the number of chunks and the dataset's name. Integers are int32, sums float32: means times calls."""
        path, n_bytes, position = self.path, self.path.stat().st_size, 0
        data = FileReader(path).read(0, n_bytes) if n_bytes else b""

        def damaged(what: str) -> UserError:
            if not self._entries:
                return UserError(
                    f"--imatrix: {path} is no importance matrix, neither a GGUF file nor an old one of llama-imatrix: {what}; "
                    "make one with llama-imatrix -m MODEL -f TEXT"
                )
            return UserError(f"--imatrix: {path}: truncated or damaged: {what}; make the file again with llama-imatrix -m MODEL -f TEXT")

        def take(n: int, dtype: str, what: str) -> np.ndarray:
            nonlocal position
            start, end = position, position + n * np.dtype(dtype).itemsize
            if end > n_bytes:
                raise damaged(f"{what} needs {end:,} bytes, the file has {n_bytes:,}")
            position = end
            return np.frombuffer(data, dtype, n, start)

        def number(what: str, least: int, most: int = 2**31 - 1) -> int:
            value = int(take(1, "<i4", what)[0])
            if not least <= value <= most:
                raise damaged(f"{what} is {value:,}, must be {least:,} to {most:,}")
            return value

        n_entries = number("the number of entries", 1)
        for i in range(1, n_entries + 1):
            what = f"entry {i} of {n_entries}"
            raw = take(number(f"the length of the name of {what}", 1, MAX_NAME - 1), "u1", what).tobytes()
            name = raw.decode(errors="replace")
            if not name.isprintable() or name in self._entries:
                raise damaged(f"the name of {what} is {raw!r}{', which was there before' if name in self._entries else ''}")
            n_calls = number(f"the number of calls of {what}, {name},", -(2**31))
            n_sums = number(f"the number of sums of {what}, {name},", 1)
            # without calls the sums are taken as they are
            self._entries[name] = take(n_sums, "<f4", f"{what}, {name},"), np.float32([max(n_calls, 0) or 1])
        if position < n_bytes:
            self._n_chunks = number("the number of chunks", -(2**31))
        if position < n_bytes:
            raw = take(number("the length of the dataset's name", 0), "u1", "the dataset's name").tobytes()
            self._datasets = [raw.decode(errors="replace")]

    def _add_entry(self, file: GGUFFile, name: str, sums: Tensor, counts: Tensor | None) -> None:
        where, way_out = f"--imatrix: {self.path}: tensor {name}", "make the file again with llama-imatrix -m MODEL -f TEXT"
        if counts is None:
            raise UserError(f"{where}: {SUMS} has no {COUNTS} beside it; {way_out}")
        for tensor in (sums, counts):
            if tensor.type != GGMLQuantizationType.F32:
                raise UserError(f"{where}: {tensor.name} is {tensor.type.name.lower()}, must be f32; {way_out}")
        if sums.n_elements % counts.n_elements:
            raise UserError(
                f"{where}: {sums.n_elements:,} sums are no multiple of the {counts.n_elements:,} counts; {way_out}"
            )
        self._entries[name] = tuple(file.rows(t, 0, t.n_rows).view("<f4").ravel() for t in (sums, counts))

    def _check_entry(self, name: str) -> None:
        where, way_out = f"--imatrix: {self.path}: tensor {name}", "make the file again with llama-imatrix -m MODEL -f TEXT"
        for values, kind in zip(self._entries[name], (SUMS, COUNTS)):
            bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
            if bad.size:
                raise UserError(
                    f"{where}: value {bad[0]:,} of {name}{kind} is {values[bad[0]]:g}, must be finite and not negative; {way_out}"
                )
        if (top := self._means(name).max()) > LARGEST:
            raise UserError(f"{where}: an importance is {top:g}, must be at most {LARGEST:g}; {way_out}")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def exclude(self, names: Iterable[str]) -> None:
        """Entries of these names are not used from now on."""
        self.excluded |= frozenset(names)
        self._entries = {name: entry for name, entry in self._entries.items() if name not in self.excluded}

    def names(self) -> list[str]:
        """Names of the weight matrices that have an entry, in the file's order."""
        return list(self._entries)

    def n_values(self, name: str) -> int:
        """Number of importances of an entry, of all its matrices together."""
        return self._entries[name][0].size

    def _tokens(self, name: str) -> np.ndarray:
        """Of each matrix that has a count, float32 (n_counts,): to the nearest integer, halves up, as the loader's lround()."""
        return np.floor(self._entries[name][1].astype(np.float64) + 0.5).astype(np.float32)

    def _means(self, name: str) -> np.ndarray:
        """Float32 (n_counts, n_values / n_counts); ones where no token was seen."""
        tokens = self._tokens(name)[:, None]
        sums = self._entries[name][0].reshape(len(tokens), -1)
        out = np.ones(sums.shape, np.float32)
        np.divide(sums, tokens, out=out, where=tokens > 0)
        return out

    def experts_without_tokens(self, tensor: Tensor) -> list[int]:
        """Experts of a tensor that saw no token, where others did. tensor: of the size of its entry.

        Old files, and GGUF files made of them, have one count for all experts, and ones for those that saw none.
        """
        n_matrices, tokens = self.n_values(tensor.name) // tensor.ne[0], self._tokens(tensor.name)
        if n_matrices == 1:
            return []
        if len(tokens) == n_matrices:
            is_lacking = tokens == 0
        else:
            is_lacking = (self._means(tensor.name).reshape(n_matrices, -1) == 1).all(axis=1)
        return [] if is_lacking.all() else np.flatnonzero(is_lacking).tolist()

    def values(self, tensor: Tensor) -> np.ndarray:
        """Importances of a tensor of the size of its entry: float32 (n_matrices, n_columns), n_matrices being 1 or its experts.

        An expert that saw no token gets the mean over the tokens of the others, where llama-quantize takes ones. A matrix alone
        of which no token is counted, or all experts of which none saw one, have ones.
        """
        out = self._means(tensor.name).reshape(-1, tensor.ne[0])
        if lacking := self.experts_without_tokens(tensor):
            tokens = self._tokens(tensor.name)
            share = (tokens if len(tokens) == len(out) else np.ones(len(out))).astype(np.float64)
            share[lacking] = 0
            out[lacking] = share @ out / share.sum()
        return out

    def metadata(self) -> list[KeyValue]:
        """The keys that llama-quantize writes about the importance matrix in use: of files the names alone, as folders are nobody
        else's business and differ between runs that are equal."""
        out = [string_value("quantize.imatrix.file", self.path.name)]
        if self._datasets:
            # written on any system: this takes both kinds of slashes
            out.append(string_value("quantize.imatrix.dataset", PureWindowsPath(self._datasets[0]).name))
        out.append(uint32_value("quantize.imatrix.entries_count", len(self)))
        if isinstance(self._n_chunks, int) and self._n_chunks > 0:
            out.append(uint32_value("quantize.imatrix.chunks_count", self._n_chunks))
        return out


def _block_means(importances: np.ndarray) -> np.ndarray:
    """For each of the columns, float64 (n_matrices, n_columns). Blocks with next to nothing count as a little of their matrix, and matrices
    of zeros as ones."""
    starts = np.arange(0, importances.shape[1], BLOCK)
    sizes = np.diff(starts, append=importances.shape[1])
    means = np.add.reduceat(importances, starts, axis=1, dtype=np.float64) / sizes
    whole = importances.mean(axis=1, dtype=np.float64, keepdims=True)
    return np.repeat(np.maximum(means, DEAD * np.where(whole > 0, whole, 1)), sizes, axis=1)


def dead_columns(importances: np.ndarray) -> np.ndarray:
    """Columns whose inputs the calibration left at zero, or next to it: bool, as importances, float32 (n_matrices, n_columns)."""
    return importances < DEAD * _block_means(importances)


def apply_floor(importances: np.ndarray) -> np.ndarray:
    """What encoders get, of float32 (n_matrices, n_columns): dead columns count a little, for encoders of llama.cpp would erase them."""
    return np.where(dead_columns(importances), FLOOR * _block_means(importances), importances).astype(np.float32)


def n_importances(tensor: Tensor) -> int:
    """How many importances a weight matrix takes: one a column, for each of its experts."""
    return tensor.ne[0] * (tensor.ne[2] if len(tensor.ne) > 2 else 1)
