"""Imatrix files of llama-imatrix: the mean square of each column of a tensor's input, which is the Hessian's diagonal.

Formats and normalization follow llama.cpp: common/imatrix-loader.cpp and load_imatrix() of tools/quantize/quantize.cpp. The old format
(save_imatrix_legacy() of tools/imatrix/imatrix.cpp) does not count tokens per expert.
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
# Mean squares of activations stay below 1e9. Far above LARGEST, ggml's encoders overflow float32, and some abort.
LARGEST = 1e15
DATASETS_KEY, N_CHUNKS_KEY, CHUNK_SIZE_KEY = KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
# A column whose importance is below DEAD times the mean of its BLOCK gets FLOOR times that mean, because llama.cpp's encoders erase columns
# without importance: docs/results/calibration.md.
BLOCK = 256
DEAD, FLOOR = 1e-8, 0.1


class ImportanceMatrix:
    """An imatrix in GGUF or in the old format (.dat).

    Attributes:
        excluded: names of entries that exclude() removed.
    """

    def __init__(self, path: Path):
        """Read and check the complete file. UserError if it is no valid imatrix."""
        self.path = path
        self.is_old = path.is_file() and not has_magic(path)
        self._entries: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # by name: sums float32 (n,), tokens float32 (n_counts,)
        self.excluded: frozenset[str] = frozenset()
        self._datasets: list[str] | None = None
        self._n_chunks: object = None
        if self.is_old:
            self._read_old()
        else:
            self._read_gguf()
        for name in self._entries:
            self._check_entry(name)
        if not any(sums.any() for sums, _ in self._entries.values()):
            raise UserError(
                f"--imatrix: {path} holds only zeros, which give all weights the same importance: make it again with "
                "llama-imatrix -m MODEL -f TEXT"
            )

    def _read_gguf(self) -> None:
        path, file = self.path, GGUFFile(self.path)
        tensors = {t.name: t for t in file.tensors}
        names = [n.removesuffix(SUMS) for n in tensors if n.endswith(SUMS)]
        if not names:
            raise UserError(
                f"--imatrix: {path} holds no imatrix: it has no tensor named *{SUMS}; make one with llama-imatrix -m MODEL -f TEXT"
            )
        for key in KEYS:
            if key not in file.metadata:
                raise UserError(f"--imatrix: {path} has no key {key}: make the file again with llama-imatrix -m MODEL -f TEXT")
        for name in names:
            self._add_entry(file, name, tensors[name + SUMS], tensors.get(name + COUNTS))
        self._datasets, self._n_chunks = file.strings(DATASETS_KEY), file.value(N_CHUNKS_KEY)

    def _read_old(self) -> None:
        """Read the old format, int32 and float32.

        Number of entries; per entry the name's length, the name, calls, number of sums, sums (means times calls); optionally the number
        of chunks and the dataset's name.
        """
        path, n_bytes, position = self.path, self.path.stat().st_size, 0
        data = FileReader(path).read(0, n_bytes) if n_bytes else b""

        def damaged(what: str) -> UserError:
            if not self._entries:
                return UserError(
                    f"--imatrix: {path} is no imatrix, neither a GGUF file nor an old one of llama-imatrix: {what}; "
                    "make one with llama-imatrix -m MODEL -f TEXT"
                )
            return UserError(f"--imatrix: {path}: truncated or damaged: {what}; make the file again with llama-imatrix -m MODEL -f TEXT")

        def read_array(n: int, dtype: str, what: str) -> np.ndarray:
            nonlocal position
            start, end = position, position + n * np.dtype(dtype).itemsize
            if end > n_bytes:
                raise damaged(f"{what} needs {end:,} bytes, the file has {n_bytes:,}")
            position = end
            return np.frombuffer(data, dtype, n, start)

        def read_number(what: str, least: int, most: int = 2**31 - 1) -> int:
            value = int(read_array(1, "<i4", what)[0])
            if not least <= value <= most:
                raise damaged(f"{what} is {value:,}, must be {least:,} to {most:,}")
            return value

        n_entries = read_number("the number of entries", 1)
        for i in range(1, n_entries + 1):
            what = f"entry {i} of {n_entries}"
            raw = read_array(read_number(f"the length of the name of {what}", 1, MAX_NAME - 1), "u1", what).tobytes()
            name = raw.decode(errors="replace")
            if not name.isprintable() or name in self._entries:
                raise damaged(f"the name of {what} is {raw!r}{', which is a duplicate' if name in self._entries else ''}")
            n_calls = read_number(f"the number of calls of {what}, {name},", -(2**31))
            n_sums = read_number(f"the number of sums of {what}, {name},", 1)
            # without calls the sums are the means
            self._entries[name] = read_array(n_sums, "<f4", f"{what}, {name},"), np.array([max(n_calls, 0) or 1], np.float32)
        if position < n_bytes:
            self._n_chunks = read_number("the number of chunks", -(2**31))
        if position < n_bytes:
            raw = read_array(read_number("the length of the dataset's name", 0), "u1", "the dataset's name").tobytes()
            self._datasets = [raw.decode(errors="replace")]

    def _add_entry(self, file: GGUFFile, name: str, sums: Tensor, counts: Tensor | None) -> None:
        where, hint = f"--imatrix: {self.path}: tensor {name}", "make the file again with llama-imatrix -m MODEL -f TEXT"
        if counts is None:
            raise UserError(f"{where}: {SUMS} has no {COUNTS} next to it; {hint}")
        for tensor in (sums, counts):
            if tensor.type != GGMLQuantizationType.F32:
                raise UserError(f"{where}: {tensor.name} is {tensor.type.name.lower()}, must be f32; {hint}")
        if sums.n_elements % counts.n_elements:
            raise UserError(
                f"{where}: {sums.n_elements:,} sums are no multiple of the {counts.n_elements:,} counts; {hint}"
            )
        values, tokens = (file.rows(t, 0, t.n_rows).view("<f4").ravel() for t in (sums, counts))
        self._entries[name] = values, tokens

    def _check_entry(self, name: str) -> None:
        where, hint = f"--imatrix: {self.path}: tensor {name}", "make the file again with llama-imatrix -m MODEL -f TEXT"
        for values, kind in zip(self._entries[name], (SUMS, COUNTS)):
            bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
            if bad.size:
                raise UserError(
                    f"{where}: value {bad[0]:,} of {name}{kind} is {values[bad[0]]:g}, must be finite and not negative; {hint}"
                )
        if (top := self._means(name).max()) > LARGEST:
            raise UserError(f"{where}: an importance is {top:g}, must be at most {LARGEST:g}; {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def exclude(self, names: Iterable[str]) -> None:
        """Remove the entries of these names."""
        self.excluded |= frozenset(names)
        self._entries = {name: entry for name, entry in self._entries.items() if name not in self.excluded}

    def names(self) -> list[str]:
        """Return the names of the weight matrices that have an entry, in the file's order."""
        return list(self._entries)

    def n_values(self, name: str) -> int:
        """Return the number of importances of an entry, over all its experts."""
        return self._entries[name][0].size

    def _tokens(self, name: str) -> np.ndarray:
        """Return the tokens of each counted matrix, float32 (n_counts,), rounded half up as by the loader's lround()."""
        return np.floor(self._entries[name][1].astype(np.float64) + 0.5).astype(np.float32)

    def _means(self, name: str) -> np.ndarray:
        """Return the means float32 (n_counts, n_values / n_counts); ones for matrices without tokens."""
        tokens = self._tokens(name)[:, None]
        sums = self._entries[name][0].reshape(len(tokens), -1)
        out = np.ones(sums.shape, np.float32)
        np.divide(sums, tokens, out=out, where=tokens > 0)
        return out

    def experts_without_tokens(self, tensor: Tensor) -> list[int]:
        """Return the experts of a tensor that saw no token, if others did. The tensor must have the size of its entry.

        Old files, and GGUF files converted from them, have one count for all experts, and means of one for experts without tokens.
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
        """Return the importances of a tensor that has the size of its entry: float32 (n_experts or 1, n_columns).

        An expert without tokens gets the mean over the tokens of the others (llama-quantize: ones). Without any token all values are one.
        """
        out = self._means(tensor.name).reshape(-1, tensor.ne[0])
        if lacking := self.experts_without_tokens(tensor):
            tokens = self._tokens(tensor.name)
            share = (tokens if len(tokens) == len(out) else np.ones(len(out))).astype(np.float64)
            share[lacking] = 0
            out[lacking] = share @ out / share.sum()
        return out

    def metadata(self) -> list[KeyValue]:
        """Return the keys that llama-quantize writes about the imatrix, with file names instead of paths, so that equal runs
        write equal files."""
        out = [string_value("quantize.imatrix.file", self.path.name)]
        if self._datasets:
            # the file may come from any system: this splits at both kinds of slashes
            out.append(string_value("quantize.imatrix.dataset", PureWindowsPath(self._datasets[0]).name))
        out.append(uint32_value("quantize.imatrix.entries_count", len(self)))
        if isinstance(self._n_chunks, int) and self._n_chunks > 0:
            out.append(uint32_value("quantize.imatrix.chunks_count", self._n_chunks))
        return out


def _block_means(importances: np.ndarray) -> np.ndarray:
    """Return each column's block mean, float64 (n_matrices, n_columns), at least DEAD times the matrix's mean (one for zero matrices)."""
    starts = np.arange(0, importances.shape[1], BLOCK)
    sizes = np.diff(starts, append=importances.shape[1])
    means = np.add.reduceat(importances, starts, axis=1, dtype=np.float64) / sizes
    matrix_means = importances.mean(axis=1, dtype=np.float64, keepdims=True)
    return np.repeat(np.maximum(means, DEAD * np.where(matrix_means > 0, matrix_means, 1)), sizes, axis=1)


def dead_columns(importances: np.ndarray) -> np.ndarray:
    """Return which columns had inputs of almost zero in calibration: bool, shape of importances, float32 (n_matrices, n_columns)."""
    return importances < DEAD * _block_means(importances)


def apply_floor(importances: np.ndarray) -> np.ndarray:
    """Return importances float32 (n_matrices, n_columns) with a floor for dead columns, which llama.cpp's encoders would erase."""
    return np.where(dead_columns(importances), FLOOR * _block_means(importances), importances).astype(np.float32)


def n_importances(tensor: Tensor) -> int:
    """Return the number of importances of a weight matrix: one per column and expert."""
    return tensor.ne[0] * (tensor.ne[2] if len(tensor.ne) > 2 else 1)
