"""The quality of a file in its metadata, under ggml_ext.quality: figures, what they were measured with, and a digest of what they hold for.

A file whose weights, hyperparameters or tokenizer changed after the measurement has another digest, so that its figures are not shown.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from gguf import GGUFValueType

from .gguf_file import GGUFFile, KeyValue, Tensor, string_value, uint32_value
from .header_room import PREFIX, write_first_keys

DIGEST_KEY = f"{PREFIX}model_sha256"
N_PIECES, PIECE = 4, 16384  # of a tensor's data in the digest
MAX_TEXT = 100  # characters of a name, so that the entries fit into the room
TOKENIZER = "tokenizer.ggml."


@dataclass(frozen=True, kw_only=True)
class RecordedQuality:
    """What `evaluate --write` records. A field is the key PREFIX + its name.

    Attributes:
        perplexity: of the file; its standard error is in the next field, as for the other figures.
        source_perplexity: of the model that the file was made from.
        kl_divergence: mean over the scored tokens, from the source.
        kl_divergence_99: its 99th percentile.
        top_1: top-1 agreement with the source in percent.
        tokens: number of scored tokens, the second half of each chunk.
        chunks: number of chunks.
        context: tokens per chunk.
        text: name of the text.
        text_sha256: of the complete text.
        source: name of the model that the file was made from.
        devices: that computed.
        logits: their precision.
        version: of ggml-ext.
    """

    perplexity: float
    perplexity_error: float
    source_perplexity: float
    source_perplexity_error: float
    kl_divergence: float
    kl_divergence_error: float
    kl_divergence_99: float
    top_1: float
    top_1_error: float
    tokens: int
    chunks: int
    context: int
    text: str
    text_sha256: str
    source: str
    devices: str
    logits: str
    version: str

    def entries(self, file: GGUFFile) -> list[KeyValue]:
        """Make the metadata of a file with these figures."""
        return [*(_entry(f"{PREFIX}{name}", value) for name, value in asdict(self).items()), string_value(DIGEST_KEY, digest_model(file))]

    def write(self, file: GGUFFile) -> None:
        """Record the figures in a file, in the first part of a split model. UserError if it cannot be written."""
        write_first_keys(file.parts[0], self.entries(file))

    def record(self) -> dict:
        """Return the values for JSON."""
        return asdict(self)


def _entry(key: str, value: float | int | str) -> KeyValue:
    if isinstance(value, str):
        return string_value(key, value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 3]}...")
    if isinstance(value, int):
        return uint32_value(key, value)
    return KeyValue(key, GGUFValueType.FLOAT64, value, struct.pack("<Id", GGUFValueType.FLOAT64, value))


def read_quality(file: GGUFFile) -> tuple[RecordedQuality | None, bool]:
    """Read the recorded figures; returns them, and whether there are some that do not hold for this file: incomplete or of other weights."""
    values = {f.name: file.value(f"{PREFIX}{f.name}") for f in fields(RecordedQuality)}
    if all(value is None for value in values.values()):
        return None, False
    kinds = {"float": float, "int": int, "str": str}
    if not all(type(values[f.name]) is kinds[str(f.type)] for f in fields(RecordedQuality)):
        return None, True
    if not all(math.isfinite(value) for value in values.values() if isinstance(value, float)):
        return None, True
    if file.value(DIGEST_KEY) != digest_model(file):
        return None, True
    return RecordedQuality(**values), False


def digest_model(file: GGUFFile) -> str:
    """Return a SHA-256 of what a model predicts with, in any order and layout of its files.

    That is: hyperparameters, tokenizer, and of each tensor name, shape, type and up to 4 x 16 KiB of its data. Another quantization changes
    almost every block, so that samples show it; a few changed bytes between them remain unseen.
    """
    digest = hashlib.sha256()
    architecture = f"{file.value('general.architecture', '')}."
    for key, kv in sorted(file.metadata.items()):
        if key.startswith((architecture, TOKENIZER)):
            digest.update(key.encode() + kv.raw)
    for tensor in sorted(file.tensors, key=lambda t: t.name):
        digest.update(repr((tensor.name, tensor.ne[: tensor.n_dims], int(tensor.type))).encode())
        for start, n_bytes in _choose_pieces(tensor):
            digest.update(file.pieces(tensor, 1, start, n_bytes).tobytes())
    return digest.hexdigest()


def _choose_pieces(tensor: Tensor) -> Sequence[tuple[int, int]]:
    """Return start and size of the pieces of a tensor's data that count."""
    if tensor.n_bytes <= N_PIECES * PIECE:
        return [(0, tensor.n_bytes)]
    return [((tensor.n_bytes - PIECE) * i // (N_PIECES - 1), PIECE) for i in range(N_PIECES)]
