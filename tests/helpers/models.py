"""Small GGUF files and where the reference model lies."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path(os.environ.get("GGML_EXT_TEST_MODEL", ROOT / "data" / "model-f16.gguf"))


def write_gguf(path: Path, tensors: dict[str, np.ndarray], qtype: str = "F16", arch: str = "llama", fill=None) -> Path:
    """A GGUF file of float32 arrays stored as qtype (vectors as F32). fill(writer) adds metadata."""
    writer = gguf.GGUFWriter(path, arch)
    if fill:
        fill(writer)
    for name, values in tensors.items():
        target = gguf.GGMLQuantizationType[qtype if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gaussian(*shape: int, seed: int = 1) -> np.ndarray:
    """Weights of a usual size, float32; shape in numpy's order, rows last."""
    return (0.02 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def read_tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}
