"""imatrix files with Hessians, written from known inputs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from ggml_ext._formats.hessians import BLOCK
from helpers.models import finish


def correlated(n_tokens: int, n_columns: int, seed: int = 1) -> np.ndarray:
    """Return inputs like those of a layer, float32 (n_tokens, n_columns): correlated neighbours of unequal energy."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n_columns))
    return ((x + np.roll(x, 1, axis=1)) * rng.uniform(0.3, 3, n_columns)).astype(np.float32)


def pack(h: np.ndarray, kind: str) -> np.ndarray:
    """Pack the triangles of a square matrix as the file format stores them: float32 (n_values,)."""
    n, size = len(h), len(h) if kind == "full" else BLOCK
    return np.float32([h[i, j] for start in range(0, n, size) for i in range(start, min(start + size, n)) for j in range(start, i + 1)])


def write_moments(path: Path, inputs: dict, kind: str = "block", sharing: dict | None = None, keys: dict | None = None,
                  tensors: dict | None = None, chunks: int = 2, full_columns: int = 1 << 30) -> Path:
    """Write an imatrix file with Hessians.

    Args:
        inputs: owner -> float32 (n_tokens, n_columns), or a list of them for experts.
        kind: "diagonal", "block" or "full".
        sharing: other weights -> the owner of their inputs.
        keys, tensors: replace what is written; None leaves an entry out.
        chunks: the number of chunks to record.
        full_columns: with kind "full", the most columns of a full Hessian.
    """
    sharing = {owner: owner for owner in inputs} | (sharing or {})
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    values = {
        "imatrix.datasets": ["some/text.txt"], "imatrix.chunk_count": chunks, "imatrix.chunk_size": 512, "imatrix.moments": kind,
        "imatrix.moments.block_size": 256, "imatrix.moments.tensors": list(sharing), "imatrix.moments.inputs": list(sharing.values()),
    } | (keys or {})
    for key, value in values.items():
        if value is not None:
            add = {list: writer.add_array, int: writer.add_uint32, str: writer.add_string}[type(value)]
            add(key, value)
    arrays = {}
    for name, owner in sharing.items():
        experts = inputs[owner] if isinstance(inputs[owner], list) else [inputs[owner]]
        arrays[f"{name}.in_sum2"] = np.stack([(x.astype(np.float64) ** 2).sum(0) for x in experts])
        arrays[f"{name}.counts"] = np.array([[len(x)] for x in experts])
        if name == owner and kind != "diagonal":
            stored = kind if experts[0].shape[1] <= full_columns else "block"
            arrays[f"{name}.in_moments"] = np.stack([pack(x.T.astype(np.float64) @ x, stored) for x in experts])
            arrays[f"{name}.moment_counts"] = np.array([[len(x)] for x in experts])
    for name, array in (arrays | (tensors or {})).items():
        if array is not None:
            writer.add_tensor(name, array if array.dtype == np.float16 else array.astype(np.float32))
    finish(writer)
    return path
