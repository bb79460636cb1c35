"""Shared by quantize and export: the conversion, metadata of upstream file types, and the files written next to OUT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._base.errors import UserError
from .._base.files import fingerprint, identify_file, open_file, write_atomically
from .._base.package import __version__
from .._calibration.importance import DeadColumns, Importance
from .._encode.codec import Codec
from .._formats.column_scales import KEY as COLUMN_SCALES
from .._formats.gguf_file import GGUFFile, KeyValue, header_bytes, uint32_value
from .._formats.hessians import HessianUse
from .._formats.split import SPLIT_KEYS
from .._plan.plan import QuantizationPlan
from .._sequential.layers import SequentialQuantizer

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
IMPORTANCE_KEYS = (
    *(f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")),
    "ggml_ext.importance",
    "ggml_ext.importance.full_columns",
    "ggml_ext.importance.tokens",
    "ggml_ext.calibration",
)
EXT_PREFIX = "ggml_ext."  # of the keys of ggml-ext


@dataclass(frozen=True)
class Conversion:
    """A model, the plan for it, and what encoding needs."""

    file: GGUFFile
    plan: QuantizationPlan
    codec: Codec
    importance: Importance
    n_threads: int
    fallback_above: float | None = None  # a tensor whose error exceeds this multiple of the usual NMSE gets an accurate type
    sequential_quantizer: SequentialQuantizer | None = None  # encodes the layers with --propagate
    checkpoint: dict[str, Any] | None = None  # identifies the checkpoint that `file` was converted from; the file itself is new in each run

    def dead_columns(self) -> dict[str, DeadColumns]:
        """Count dead columns by tensor; those of layers that an interrupted --propagate run finished are unknown."""
        return self.importance.dead_columns(self.plan) | (self.sequential_quantizer.dead_columns if self.sequential_quantizer else {})

    def hessian_uses(self) -> dict[str, HessianUse]:
        """Describe the Hessian of each tensor; those of layers that an interrupted --propagate run finished are unknown."""
        collected = self.sequential_quantizer.hessians if self.sequential_quantizer else {}
        return self.importance.hessian_uses(self.plan) | {name: HessianUse.of(hessian) for name, hessian in collected.items()}

    def check_unchanged(self) -> None:
        """Raise UserError if an input file changed during the run."""
        for file in (self.file, *self.importance.files()):
            file.check_unchanged()

    def list_dependencies(self, **more: object) -> dict:
        """List what the output's bytes depend on, by name, for Output.begin(). more: dependencies of the command."""
        return {
            "version": [__version__, "numpy" if self.codec.lib is None else fingerprint(self.codec.lib.path)],
            "input": [identify_file(part.path, header_bytes(part)) for part in self.file.parts] if self.checkpoint is None else self.checkpoint,
            # the metadata of standard files, which are dependencies too, have no options
            "encoder": self.codec.list_dependencies(),
            "importance": [self.importance.title, [identify_file(p) for p in self.importance.paths()]],
            **({} if self.sequential_quantizer is None else {"propagation": self.sequential_quantizer.config.list_dependencies()}),
            **more,
        }


def upstream_metadata(file: GGUFFile, file_type: int, importance: Importance) -> dict[str, KeyValue]:
    """Make the metadata that llama-quantize would write: the keys of the input without those of ggml-ext but the column scales, and its own."""
    kept = {k: kv for k, kv in file.metadata.items() if not k.startswith(EXT_PREFIX) or k == COLUMN_SCALES}  # adapters need the scales
    old = {k: kv for k, kv in kept.items() if k not in (*IMPORTANCE_KEYS, *SPLIT_KEYS)}
    new = [
        *([] if importance.matrix is None else importance.matrix.metadata()),
        *importance.scales.metadata(),
        uint32_value("general.file_type", file_type),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
    ]
    return old | {kv.key: kv for kv in new}


def write_beside(flag: str, path: Path, data: bytes, output: Path, force: bool) -> None:
    """Write a file next to the finished OUT. UserError naming the flag if that fails or, without force, the file exists."""
    path = Path(os.path.realpath(path))
    try:
        with write_atomically(path, force) as part, open_file(part) as f:
            f.write(data)
    except FileExistsError as e:
        raise UserError(f"{flag}: {path} appeared during the run and was not overwritten; {output} is written") from e
    except OSError as e:
        raise UserError(f"{flag}: cannot write {path}: {e.strerror}; {output} is written") from e
