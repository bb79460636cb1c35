"""Importance matrices of llama-imatrix: for every column of a weight matrix the mean square of what it is multiplied with.

Source of format and normalisation: llama.cpp, common/imatrix-loader.cpp and load_imatrix() of tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from ._errors import UserError
from ._gguf_file import GGUFFile, KeyValue, Tensor, has_magic, string_value, uint32_value

SUMS, COUNTS = ".in_sum2", ".counts"
# Mean squares of activations stay below 1e9. ggml's encoders sum products of importances and squared weights, and square
# the sums, in float32: far above this they overflow, and some abort.
LARGEST = 1e15
KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")


class ImportanceMatrix:
    """A GGUF importance matrix, memory-mapped. Values are normalised when asked for, so that memory stays bounded."""

    def __init__(self, path: Path):
        """Opens and checks the whole file. UserError if it is no importance matrix or holds what none can hold."""
        self.path = path
        if path.is_file() and not has_magic(path):
            raise UserError(
                f"--imatrix: {path} is not a GGUF importance matrix; make one with llama-imatrix -m MODEL -f TEXT, or convert an "
                f"old .dat file with llama-imatrix --in-file {shlex.quote(str(path))} -o NEW.gguf"
            )
        self._file = GGUFFile(path)
        tensors = {t.name: t for t in self._file.tensors}
        names = [n.removesuffix(SUMS) for n in tensors if n.endswith(SUMS)]
        if not names:
            raise UserError(
                f"--imatrix: {path} holds no importance matrix: it has no tensor named *{SUMS}; make one with llama-imatrix"
            )
        for key in KEYS:
            if key not in self._file.metadata:
                raise UserError(f"--imatrix: {path} has no key {key}: make the file again with llama-imatrix")
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}
        for name in names:
            self._add_entry(name, tensors[name + SUMS], tensors.get(name + COUNTS))
        if not any(self._floats(sums).any() for sums, _ in self._entries.values()):
            raise UserError(
                f"--imatrix: {path} holds nothing but zeros, with which all weights are worth the same: make it again with "
                "llama-imatrix -m MODEL -f TEXT"
            )

    def _add_entry(self, name: str, sums: Tensor, counts: Tensor | None) -> None:
        where, way_out = f"--imatrix: {self.path}: tensor {name}", "make the file again with llama-imatrix"
        if counts is None:
            raise UserError(f"{where}: {SUMS} has no {COUNTS} beside it; {way_out}")
        for tensor in (sums, counts):
            if tensor.type != GGMLQuantizationType.F32:
                raise UserError(f"{where}: {tensor.name} is {tensor.type.name.lower()}, must be f32; {way_out}")
        if sums.n_elements % counts.n_elements:
            raise UserError(
                f"{where}: {sums.n_elements:,} sums are no multiple of the {counts.n_elements:,} counts; {way_out}"
            )
        for tensor in (sums, counts):
            values = self._floats(tensor)
            bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
            if bad.size:
                raise UserError(
                    f"{where}: value {bad[0]:,} of {tensor.name} is {values[bad[0]]:g}, must be finite and not negative; {way_out}"
                )
        self._entries[name] = sums, counts
        if (top := self.values(name).max()) > LARGEST:
            raise UserError(f"{where}: an importance is {top:g}, must be at most {LARGEST:g}; {way_out}")

    def _floats(self, tensor: Tensor) -> np.ndarray:
        return self._file.rows(tensor, 0, tensor.n_rows).view("<f4").ravel()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """Names of the weight matrices that have an entry, in the file's order."""
        return list(self._entries)

    def n_values(self, name: str) -> int:
        """Number of importances of an entry, of all its matrices together."""
        return self._entries[name][0].n_elements

    def values(self, name: str) -> np.ndarray:
        """Importances of one entry: float32 (n_matrices, n_columns), n_matrices being 1 or the number of experts.

        An expert that saw no token (count 0) gets ones, as in llama-quantize.
        """
        sums, counts = self._entries[name]
        # to the nearest integer, halves up: the loader's lround() of what is not negative
        n_tokens = np.floor(self._floats(counts).astype(np.float64) + 0.5).astype(np.float32)[:, None]
        matrix = self._floats(sums).reshape(len(n_tokens), -1)
        out = np.ones(matrix.shape, np.float32)
        np.divide(matrix, n_tokens, out=out, where=n_tokens > 0)
        return out

    def metadata(self) -> list[KeyValue]:
        """The keys that llama-quantize writes about the importance matrix in use."""
        out = [string_value("quantize.imatrix.file", str(self.path))]
        datasets = self._file.strings("imatrix.datasets")
        if datasets:
            out.append(string_value("quantize.imatrix.dataset", datasets[0]))
        out.append(uint32_value("quantize.imatrix.entries_count", len(self)))
        n_chunks = self._file.value("imatrix.chunk_count")
        if isinstance(n_chunks, int) and n_chunks > 0:
            out.append(uint32_value("quantize.imatrix.chunks_count", n_chunks))
        return out


def n_importances(tensor: Tensor) -> int:
    """How many importances a weight matrix takes: one a column, for each of its experts."""
    return tensor.ne[0] * (tensor.ne[2] if len(tensor.ne) > 2 else 1)
