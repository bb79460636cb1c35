"""The file that models are compared with: the logits of a base model on a text, as llama-perplexity --kl-divergence-base keeps them."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from .._base.errors import UserError
from .._base.files import read_record


@dataclass(frozen=True)
class BaseLogits:
    """Tokens of the text, and the model's log-probabilities in 16 bits."""

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunks: int  # fewer than asked for where the text is short

    HEADER = struct.Struct("<8sIii")

    @classmethod
    def read(cls, path: Path) -> BaseLogits:
        """UserError if the file is not complete: the program does not notice a full disk."""
        try:
            with path.open("rb") as file:
                header = file.read(cls.HEADER.size)
            found = path.stat().st_size
        except OSError as e:
            raise UserError(f"cannot read the logits in {path}: {e.strerror}") from e
        if len(header) < cls.HEADER.size or not header.startswith(b"_logits_"):
            raise UserError(f"{path} holds no logits: remove it and run again")
        logits = cls(path, *cls.HEADER.unpack(header)[1:])
        if found != (needed := logits.n_bytes()):
            raise UserError(
                f"{path} has {found:,} bytes, needed {needed:,}: its disk is full or it is damaged; free space or name another folder, and "
                "remove it"
            )
        return logits

    def n_bytes(self) -> int:
        """Size of a complete file: a row is n_vocab values, padded to an even count, and two floats."""
        row = 2 * (2 * ((self.n_vocab + 1) // 2) + 4)
        return self.HEADER.size + self.n_chunks * (4 * self.n_ctx + (self.n_ctx - 1 - self.n_ctx // 2) * row)


@dataclass(frozen=True)
class LogitsRecord:
    """Content of LOGITS.json: what logits were made from, and how to recognise the file."""

    made_from: dict
    result: dict  # fingerprint

    def __post_init__(self) -> None:
        """ValueError for what is no record: the file may have been written by anyone."""
        if not isinstance(self.made_from, dict) or not isinstance(self.result, dict):
            raise ValueError("no record of logits")

    @classmethod
    def read(cls, logits: Path) -> LogitsRecord | None:
        """None if there is no record, or if the file is another one than it describes."""
        return read_record(cls, record_path(logits), logits)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def record_path(logits: Path) -> Path:
    return logits.with_name(logits.name + ".json")
