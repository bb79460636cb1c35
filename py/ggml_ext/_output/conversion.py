"""What quantize and export share: the model that is converted, the metadata of upstream files, and files next to OUT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .._base.files import fingerprint, open_file, write_atomically
from .._base.package import __version__
from .._calibration.importance import DeadColumns, Importance
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, KeyValue, header_bytes, uint32_value
from .._formats.split import SPLIT_KEYS
from .._plan.plan import QuantizationPlan
from .._sequential.layers import SequentialQuantizer

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
IMPORTANCE_KEYS = (
    *(f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")),
    "ggml_ext.importance",
    "ggml_ext.calibration",
)
OURS = "ggml_ext."  # our keys begin with it


@dataclass(frozen=True)
class Conversion:
    """A model and what is made of it."""

    file: GGUFFile
    plan: QuantizationPlan
    codec: Codec
    importance: Importance
    n_threads: int
    fallback_above: float | None = None  # a tensor whose error is so many times the usual one gets its type's fallback
    propagation: SequentialQuantizer | None = None  # encodes the layers, if they compensate the errors before them

    def dead_columns(self) -> dict[str, DeadColumns]:
        """As Importance.dead_columns(). Nothing is known about layers that --propagate finished in an earlier run."""
        return self.importance.dead_columns(self.plan) | (self.propagation.dead_columns if self.propagation else {})

    def check_unchanged(self) -> None:
        """Raise UserError if a file that was read while tensors were encoded has changed."""
        for file in (self.file, *self.importance.files()):
            file.check_unchanged()

    def list_dependencies(self, **more: object) -> dict:
        """List what the bytes of the output depend on, by name, for Output.begin(). more: what the command's options add."""

        def identify(path: Path, n_header: int = 0) -> dict:
            return {**fingerprint(path, n_header), "modified": path.stat().st_mtime_ns}

        return {
            "version": [__version__, "numpy" if self.codec.lib is None else fingerprint(self.codec.lib.path)],
            "input": [identify(part.path, header_bytes(part)) for part in self.file.parts],
            "importance": [self.importance.kind, [identify(p) for p in self.importance.paths()]],
            **({} if self.propagation is None else {"propagation": self.propagation.config.list_dependencies()}),
            **more,
        }


def stock_metadata(file: GGUFFile, file_type: int, importance: Importance) -> dict[str, KeyValue]:
    """Make the metadata of an upstream file: the keys of the input without ours, and those that llama-quantize writes."""
    old = {k: kv for k, kv in file.metadata.items() if not k.startswith(OURS) and k not in (*IMPORTANCE_KEYS, *SPLIT_KEYS)}
    new = [
        *([] if importance.matrix is None else importance.matrix.metadata()),
        uint32_value("general.file_type", file_type),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
    ]
    return old | {kv.key: kv for kv in new}


def write_beside(flag: str, path: Path, data: bytes, output: Path, force: bool) -> None:
    """Write a file next to OUT, which is written already. UserError naming the flag if that fails or, without force, the file exists."""
    path = Path(os.path.realpath(path))
    try:
        with write_atomically(path, force) as part, open_file(part) as f:
            f.write(data)
    except FileExistsError as e:
        raise UserError(f"{flag}: {path} appeared meanwhile, and was left as it is; {output} is written") from e
    except OSError as e:
        raise UserError(f"{flag}: cannot write {path}: {e.strerror}; {output} is written") from e
