"""What makes one model of another, for quantize and export alike: what it is made from, and files beside OUT."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .._base.files import fingerprint, open_file, write_atomically
from .._base.package import __version__
from .._calibration.importance import Importance
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, KeyValue, header_bytes, uint32_value
from .._formats.split import SPLIT_KEYS
from .._plan.plan import Plan
from .._sequential.layers import Propagation

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
IMPORTANCE_KEYS = (
    *(f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")),
    "ggml_ext.importance",
    "ggml_ext.calibration",
)
OURS = "ggml_ext."  # our keys begin with it
WAY_OUT = "pass --quiet if nobody reads it"


@dataclass(frozen=True)
class Conversion:
    """A model and what becomes of it. fallback_above: errors above so many times a type's usual one make a tensor be stored in the
    type's fallback; None: never. propagation: what makes the matrices of the layers, if they make up for the errors before them."""

    file: GGUFFile
    plan: Plan
    codec: Codec
    importance: Importance
    n_threads: int
    fallback_above: float | None = None
    propagation: Propagation | None = None

    def dead_columns(self) -> dict[str, tuple[int, int]]:
        """As Importance.dead_columns(). Of layers that --propagate made in an earlier run nothing is known."""
        return self.importance.dead_columns(self.plan) | (self.propagation.dead_columns if self.propagation else {})

    def check_unchanged(self) -> None:
        """UserError if a file that was read while tensors were encoded is not what it was."""
        for file in (self.file, *self.importance.files()):
            file.check_unchanged()

    def made_from(self, **more) -> dict:
        """What the bytes of the output depend on, by name, for Output.begin(). more: what the program's options add."""

        def identity(path: Path, n_header: int = 0) -> dict:
            return {**fingerprint(path, n_header), "modified": path.stat().st_mtime_ns}

        return {
            "version": [__version__, "numpy" if self.codec.lib is None else fingerprint(self.codec.lib.path)],
            "input": [identity(part.path, header_bytes(part)) for part in self.file.parts],
            "importance": [self.importance.kind, [identity(p) for p in self.importance.paths()]],
            **({} if self.propagation is None else {"propagation": self.propagation.run.made_from()}),
            **more,
        }


def stock_metadata(file: GGUFFile, file_type: int, importance: Importance) -> dict[str, KeyValue]:
    """Of a file for every llama.cpp: the keys of the input without ours, and those that llama-quantize writes. file_type: of
    general.file_type."""
    old = {k: kv for k, kv in file.metadata.items() if not k.startswith(OURS) and k not in (*IMPORTANCE_KEYS, *SPLIT_KEYS)}
    new = [
        *([] if importance.matrix is None else importance.matrix.metadata()),
        uint32_value("general.file_type", file_type),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
    ]
    return old | {kv.key: kv for kv in new}


def write_beside(flag: str, path: Path, data: bytes, output: Path, force: bool) -> None:
    """UserError naming the flag if it cannot be written, or, without force, exists by now, which says that OUT is written."""
    path = Path(os.path.realpath(path))
    try:
        with write_atomically(path, force) as part, open_file(part) as f:
            f.write(data)
    except FileExistsError as e:
        raise UserError(f"{flag}: {path} appeared meanwhile, and was left as it is; {output} is written") from e
    except OSError as e:
        raise UserError(f"{flag}: cannot write {path}: {e.strerror}; {output} is written") from e
