"""The logits of a base model on a text, as llama-perplexity --kl-divergence-base writes them."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .._base.errors import UserError
from .._base.files import mapping_error, read_record


@dataclass(frozen=True)
class BaseLogits:
    """A file with the text's tokens and the model's log-probabilities in 16 bits. n_chunks: may be less than requested."""

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunks: int

    HEADER: ClassVar = struct.Struct("<8sIii")

    @classmethod
    def read(cls, path: Path) -> BaseLogits:
        """Read the header and check the size. UserError if the file is incomplete, because the program does not notice a full disk."""
        try:
            with path.open("rb") as file:
                header = file.read(cls.HEADER.size)
            n_bytes = path.stat().st_size
        except OSError as e:
            raise UserError(f"cannot read the logits in {path}: {e.strerror}") from e
        if len(header) < cls.HEADER.size or not header.startswith(b"_logits_"):
            raise UserError(f"{path} holds no logits: remove it and run again")
        logits = cls(path, *cls.HEADER.unpack(header)[1:])
        if n_bytes != (needed := logits.n_bytes()):
            raise UserError(
                f"{path} has {n_bytes:,} bytes, must have {needed:,}: the disk is full or the file damaged; free space or name another "
                "directory, and remove the file"
            )
        return logits

    @property
    def n_scored(self) -> int:
        """The number of scored tokens: the second half of each chunk."""
        return self.n_chunks * (self.n_ctx - 1 - self.n_ctx // 2)

    @property
    def _row_values(self) -> int:
        """The 16-bit values of a row: two floats, and n_vocab values padded to an even number."""
        return 4 + 2 * ((self.n_vocab + 1) // 2)

    def n_bytes(self) -> int:
        """Return the size of a complete file."""
        return self.HEADER.size + 4 * self.n_chunks * self.n_ctx + 2 * self.n_scored * self._row_values

    def read_tokens(self) -> np.ndarray:
        """Return the tokens of the text: int32 (n_chunks, n_ctx)."""
        return np.fromfile(self.path, "<i4", self.n_chunks * self.n_ctx, offset=self.HEADER.size).reshape(self.n_chunks, self.n_ctx)

    def read_chunk(self, chunk: int) -> np.ndarray:
        """Map the logits of a chunk: uint16 (scored tokens, values of a row). UserError if the file cannot be mapped."""
        n_rows = self.n_scored // self.n_chunks
        start = self.HEADER.size + 4 * self.n_chunks * self.n_ctx + 2 * chunk * n_rows * self._row_values
        try:
            return np.memmap(self.path, "<u2", "r", start, (n_rows, self._row_values))
        except OSError as e:
            raise UserError(mapping_error(self.path, e)) from e


def to_log_probabilities(rows: np.ndarray, n_vocab: int) -> np.ndarray:
    """Decode rows of read_chunk(), which begin with two floats: the step and the smallest value."""
    step, least = np.ascontiguousarray(rows[:, :4]).view("<f4").T
    return rows[:, 4 : 4 + n_vocab].astype(np.float32) * step[:, None] + least[:, None]


@dataclass(frozen=True)
class LogitsRecord:
    """Content of LOGITS.json: the settings that produced the logits, and the fingerprint of their file."""

    made_from: dict[str, Any]
    result: dict[str, Any]

    def __post_init__(self) -> None:
        """Raise ValueError for wrong types, because anyone may have written the file."""
        if not isinstance(self.made_from, dict) or not isinstance(self.result, dict):
            raise ValueError("no record of logits")

    @classmethod
    def read(cls, logits: Path) -> LogitsRecord | None:
        """Return the record, or None if it is missing or describes another file."""
        return read_record(cls, record_path(logits), logits)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def record_path(logits: Path) -> Path:
    return logits.with_name(logits.name + ".json")
