"""GGUF files: a checked header, random access to rows, and the header of the output.

This module replaces gguf.GGUFReader and GGUFWriter. The reader creates numpy objects for every array element (19 s and 1.3 GB for a
vocabulary of 256,000) and trusts the counts and sizes in the file; the writer cannot write empty arrays. Key/value pairs are copied as
raw bytes, so nothing is lost. Format: ggml's docs/gguf.md, with the limits of ggml's own reader.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGMLQuantizationType, GGUFValueType

from .._base.encoding import to_utf8
from .._base.errors import UserError
from .._base.file_reader import FileReader
from .._base.files import fingerprint
from .._base.types import RETIRED_TYPES, TYPES

MAGIC = b"GGUF"
VERSIONS = (2, GGUF_VERSION)  # 2 and 3 have the same layout
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 64  # GGML_MAX_NAME, including the terminating zero
MAX_ELEMENTS = 2**63 - 1
PIECE = 1 << 20  # bytes of the header per read
SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


def pad(n: int, alignment: int) -> int:
    """Round n up to a multiple of alignment."""
    return (n + alignment - 1) // alignment * alignment


@dataclass(frozen=True)
class KeyValue:
    """One entry of a file's metadata."""

    key: str
    type: GGUFValueType
    value: int | float | bool | str | None  # None for arrays
    raw: bytes  # type and value, as in the file


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in a header."""

    name: str
    ne: tuple[int, ...]  # dimensions, fastest first, as ggml writes them
    type: GGMLQuantizationType
    offset: int  # in the file
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return prod(self.ne)

    @property
    def n_rows(self) -> int:
        return self.n_elements // self.ne[0]

    @property
    def n_dims(self) -> int:
        """Number of dimensions without trailing ones, as ggml counts them."""
        return max((i + 1 for i, n in enumerate(self.ne) if n > 1), default=1)

    def bytes_as(self, qtype: GGMLQuantizationType) -> int:
        """Return the size of the data in another type, whose block size must divide the rows."""
        return row_bytes(qtype, self.ne[0]) * self.n_rows


def row_bytes(qtype: GGMLQuantizationType, n_per_row: int) -> int:
    """Return the bytes of a row of n_per_row elements, a multiple of the type's block size."""
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    return n_per_row // block_size * block_bytes


def bits_per_weight(qtype: GGMLQuantizationType) -> float:
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    return 8 * block_bytes / block_size


class _Cursor:
    """Reads the header front to back and checks every step against the size of the file."""

    def __init__(self, source: FileReader):
        self.path, self.position = source.path, 0
        self.source, self.data = source, bytearray()  # the bytes read so far

    def skip(self, n_bytes: int, what: str) -> int:
        """Advance by n_bytes and return the old position."""
        start, end = self.position, self.position + n_bytes
        if end > self.source.n_bytes:
            raise UserError(
                f"{self.path}: truncated or corrupt: {what} needs {end:,} bytes, the file has "
                f"{self.source.n_bytes:,}; download or convert it again"
            )
        if end > (n := len(self.data)):
            self.data += self.source.read(n, max(end - n, min(PIECE, self.source.n_bytes - n)))
        self.position = end
        return start

    def scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.skip(struct.calcsize(fmt), what))[0]

    def string(self, what: str) -> bytes:
        n_bytes = self.scalar("<Q", what)
        start = self.skip(n_bytes, what)
        return bytes(self.data[start : start + n_bytes])

    def name(self, what: str) -> str:
        raw = self.string(what)
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise UserError(f"{self.path}: {what} is not UTF-8: {raw[:80]!r}; convert the model again") from e

    def value_type(self, what: str) -> GGUFValueType:
        number = self.scalar("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError as e:
            raise UserError(f"{self.path}: {what} has unknown value type {number}; convert the model again") from e

    def key_value(self, what: str) -> KeyValue:
        key = self.name(what)
        what = f"key {key!r}"
        start = self.position
        vtype = self.value_type(what)
        value: int | float | bool | str | None = None
        if vtype == GGUFValueType.ARRAY:
            self._array(what)
        elif vtype == GGUFValueType.STRING:
            raw = self.string(what)
            value = raw.decode(errors="replace")
        else:
            value = self.scalar(SCALAR_FORMATS[vtype], what)
        return KeyValue(key, vtype, value, bytes(self.data[start : self.position]))

    def _array(self, what: str) -> None:
        etype = self.value_type(what)
        n = self.scalar("<Q", what)
        if etype == GGUFValueType.ARRAY:
            raise UserError(f"{self.path}: {what} is an array of arrays, which ggml does not read")
        if etype == GGUFValueType.STRING:
            for _ in range(n):
                self.skip(self.scalar("<Q", what), what)
        else:
            self.skip(n * struct.calcsize(SCALAR_FORMATS[etype]), what)


def has_magic(path: Path) -> bool:
    """Return whether the file begins with GGUF's magic number. UserError if it cannot be read."""
    try:
        with open(path, "rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e


class BigEndianFile(UserError):
    """A big-endian file, which only gguf's own tools read."""


class GGUFFile:
    """A GGUF file. The constructor reads and checks the complete header; UserError if it is damaged."""

    def __init__(self, path: Path):
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                kind = "a directory" if path.is_dir() else "not a regular file"
                raise UserError(f"{path} is {kind}: pass a GGUF file")
            self._source = FileReader(path)
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from e
        self.n_bytes = self._source.n_bytes
        if self._source.read(0, min(len(MAGIC), self.n_bytes)) != MAGIC:
            raise UserError(
                f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}; pass one, or the directory of a "
                "Hugging Face checkpoint with its config.json"
            )
        cursor = _Cursor(self._source)
        cursor.skip(len(MAGIC), "the magic")
        n_tensors, n_kv = self._read_counts(cursor)
        self.metadata: dict[str, KeyValue] = {}
        for i in range(n_kv):
            kv = cursor.key_value(f"key {i + 1} of {n_kv}")
            if kv.key in self.metadata:
                raise UserError(f"{path}: key {kv.key!r} is there twice; convert the model again")
            self.metadata[kv.key] = kv
        self.alignment = self._read_alignment()
        self.tensors = self._read_tensors(cursor, n_tensors)
        self.n_header = cursor.position  # bytes before the padding

    @property
    def parts(self) -> list[GGUFFile]:
        """The files of a split model, or this file."""
        return [self]

    @property
    def stem(self) -> str:
        """The file's name without its suffix."""
        return self.path.name.removesuffix(".gguf")

    @property
    def has_more(self) -> bool:
        """Whether another GGUF file is appended to this one."""
        end = max((t.offset + t.n_bytes for t in self.tensors), default=self.n_bytes)
        return any(
            self._source.read(start, len(MAGIC)) == MAGIC
            for start in {end, pad(end, self.alignment)} if start + len(MAGIC) <= self.n_bytes
        )

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        version = cursor.scalar("<I", "the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise BigEndianFile(
                    f"{self.path} is a big-endian GGUF file, little-endian is needed: convert it with "
                    "gguf-convert-endian"
                )
            raise UserError(
                f"{self.path} is GGUF version {version}, this tool reads {' and '.join(map(str, VERSIONS))}"
            )
        n_tensors, n_kv = cursor.scalar("<Q", "the tensor count"), cursor.scalar("<Q", "the key count")
        # minimum sizes: key/value pair 8 + 4 + 1 bytes, tensor info 8 + 4 + 8 + 4 + 8
        least = n_kv * 13 + n_tensors * 32
        if least > self.n_bytes:
            raise UserError(
                f"{self.path}: truncated or corrupt: {n_kv:,} keys and {n_tensors:,} tensors need {least:,} "
                f"bytes, the file has {self.n_bytes:,}; download or convert it again"
            )
        return n_tensors, n_kv

    def _read_alignment(self) -> int:
        kv = self.metadata.get("general.alignment")
        if kv is None:
            return GGUF_DEFAULT_ALIGNMENT
        value = kv.value
        if kv.type != GGUFValueType.UINT32 or not isinstance(value, int) or value == 0 or value & (value - 1):
            raise UserError(f"{self.path}: general.alignment is {value} ({kv.type.name}), must be a power of two (UINT32)")
        return value

    def _read_tensors(self, cursor: _Cursor, n_tensors: int) -> list[Tensor]:
        infos = [self._read_tensor_info(cursor, f"tensor info {i + 1} of {n_tensors}") for i in range(n_tensors)]
        start = pad(cursor.position, self.alignment)
        names: set[str] = set()
        tensors: list[Tensor] = []
        for name, ne, qtype, offset in infos:
            n_bytes = row_bytes(qtype, ne[0]) * prod(ne[1:])
            if name in names:
                raise UserError(f"{self.path}: tensor {name} is there twice; convert the model again")
            names.add(name)
            if offset % self.alignment:
                raise UserError(
                    f"{self.path}: tensor {name} is at offset {offset}, no multiple of the alignment {self.alignment}"
                )
            end = start + offset + n_bytes
            if end > self.n_bytes:
                raise UserError(
                    f"{self.path}: truncated: tensor {name} ends at byte {end:,}, the file has "
                    f"{self.n_bytes:,}; download or convert it again"
                )
            tensors.append(Tensor(name, ne, qtype, start + offset, n_bytes))
        for first, second in pairwise(sorted(tensors, key=lambda t: t.offset)):
            if first.offset + first.n_bytes > second.offset:
                raise UserError(
                    f"{self.path}: tensor {second.name} begins at byte {second.offset:,}, inside tensor {first.name}, which ends at "
                    f"{first.offset + first.n_bytes:,}: the header is damaged; download or convert it again"
                )
        return tensors

    def _read_tensor_info(self, cursor: _Cursor, what: str) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.name(what)
        what = f"tensor {name[:MAX_NAME]}"
        if len(name.encode()) >= MAX_NAME:
            raise UserError(
                f"{self.path}: {what}...: the name has {len(name.encode())} bytes, ggml allows {MAX_NAME - 1}"
            )
        n_dims = cursor.scalar("<I", what)
        if not 1 <= n_dims <= MAX_DIMS:
            raise UserError(f"{self.path}: {what} has {n_dims} dimensions, must be 1 to {MAX_DIMS}")
        ne = tuple(cursor.scalar("<Q", what) for _ in range(n_dims))
        number = cursor.scalar("<I", what)
        offset = cursor.scalar("<Q", what)
        if 0 in ne or prod(ne) > MAX_ELEMENTS:
            raise UserError(
                f"{self.path}: {what} has the dimensions {list(ne)}: each must be at least 1, their product "
                "below 2**63; convert the model again"
            )
        if number in RETIRED_TYPES:
            raise UserError(
                f"{self.path}: {what} has type {number}, {RETIRED_TYPES[number]} before its code was changed; quantize the model again"
            )
        try:
            qtype = GGMLQuantizationType(number)
        except ValueError as e:
            raise UserError(
                f"{self.path}: {what} has the unknown type {number}: the file may need a newer version of the "
                "gguf package"
            ) from e
        if (info := TYPES.get(qtype.name.lower())) is not None and info.kind == "activation":
            raise UserError(
                f"{self.path}: {what} has type {number} ({info.name}), which is for activations, not for weights; download or convert "
                "the model again"
            )
        block_size = GGML_QUANT_SIZES[qtype][0]
        if ne[0] % block_size:
            raise UserError(
                f"{self.path}: {what} has rows of {ne[0]}, no multiple of {block_size} as {qtype.name} needs"
            )
        return name, ne, qtype, offset

    def rows(self, tensor: Tensor, first: int, count: int) -> np.ndarray:
        """Read `count` rows of the flattened tensor, from row `first` on: uint8 (count, row_bytes). UserError if that fails."""
        return self.pieces(tensor, row_bytes(tensor.type, tensor.ne[0]), first, count)

    def pieces(self, tensor: Tensor, size: int, first: int, count: int) -> np.ndarray:
        """Read `count` pieces of `size` bytes, from piece `first` on: uint8 (count, size)."""
        data = self._source.read(tensor.offset + first * size, count * size)
        return np.frombuffer(data, np.uint8).reshape(count, size)

    def is_hole(self, tensor: Tensor) -> bool:
        """Return whether the tensor's data is a hole of a sparse file."""
        return self._source.is_hole(tensor.offset, tensor.n_bytes)

    def complete(self, reader: str) -> None:
        """Write what a program needs that reads the file itself; nothing, except for checkpoints. reader: the program."""

    def fingerprints(self) -> list[dict[str, Any]]:
        """Return what identifies the contents for caches, for JSON: fingerprint() of the parts."""
        return [fingerprint(part.path, header_bytes(part)) for part in self.parts]

    def check_unchanged(self) -> None:
        """Raise FileChanged if the file was replaced or written to after it was opened."""
        self._source.check_unchanged()

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Replace a UserError in the block by FileChanged if the file has changed, as that explains errors of programs that read it."""
        try:
            yield
        except UserError:
            self.check_unchanged()
            raise

    def _array_payload(self, key: str, element: GGUFValueType) -> tuple[int, bytes] | None:
        """Return count and bytes of an array; None if the key is missing or has another type."""
        kv = self.metadata.get(key)
        if kv is None or kv.type != GGUFValueType.ARRAY or struct.unpack_from("<I", kv.raw, 4)[0] != element:
            return None
        return struct.unpack_from("<Q", kv.raw, 8)[0], kv.raw[16:]

    def strings(self, key: str) -> list[str] | None:
        """Return an array of strings; None if the key is missing or has another type."""
        payload = self._array_payload(key, GGUFValueType.STRING)
        if payload is None:
            return None
        count, raw = payload
        out, position = [], 0
        for _ in range(count):
            (n_bytes,) = struct.unpack_from("<Q", raw, position)
            out.append(raw[position + 8 : position + 8 + n_bytes].decode(errors="replace"))
            position += 8 + n_bytes
        return out

    def floats(self, key: str) -> np.ndarray | None:
        """Return an array of float32, shape (n,); None if the key is missing or has another type."""
        payload = self._array_payload(key, GGUFValueType.FLOAT32)
        return None if payload is None else np.frombuffer(payload[1], "<f4")

    def integers(self, key: str) -> list[int] | None:
        """Return an array of 32-bit integers; None if the key is missing or has another type."""
        for element, dtype in ((GGUFValueType.INT32, "<i4"), (GGUFValueType.UINT32, "<u4")):
            if payload := self._array_payload(key, element):
                return np.frombuffer(payload[1], dtype, payload[0]).tolist()
        return None

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a scalar or string key; default if it is missing."""
        kv = self.metadata.get(key)
        return default if kv is None else kv.value


def uint32_value(key: str, value: int) -> KeyValue:
    return KeyValue(key, GGUFValueType.UINT32, value, struct.pack("<II", GGUFValueType.UINT32, value))


def uint16_value(key: str, value: int) -> KeyValue:
    return KeyValue(key, GGUFValueType.UINT16, value, struct.pack("<IH", GGUFValueType.UINT16, value))


def int32_value(key: str, value: int) -> KeyValue:
    return KeyValue(key, GGUFValueType.INT32, value, struct.pack("<Ii", GGUFValueType.INT32, value))


def string_value(key: str, value: str) -> KeyValue:
    """Build a string entry; a file name need not be UTF-8."""
    value = to_utf8(value)
    raw = value.encode()
    return KeyValue(key, GGUFValueType.STRING, value, struct.pack("<IQ", GGUFValueType.STRING, len(raw)) + raw)


def strings_value(key: str, values: list[str]) -> KeyValue:
    raw = b"".join(struct.pack("<Q", len(v.encode())) + v.encode() for v in values)
    return array_value(key, GGUFValueType.STRING, len(values), raw)


def floats_value(key: str, values: np.ndarray) -> KeyValue:
    """Build an array entry of float32 (n,)."""
    return array_value(key, GGUFValueType.FLOAT32, len(values), values.astype("<f4").tobytes())


def array_value(key: str, element: GGUFValueType, count: int, raw: bytes) -> KeyValue:
    """Build an array entry of `count` elements, serialized in `raw`."""
    return KeyValue(key, GGUFValueType.ARRAY, None, struct.pack("<IIQ", GGUFValueType.ARRAY, element, count) + raw)


def pack_header(
    metadata: dict[str, KeyValue], tensors: list[Tensor], types: list[GGMLQuantizationType], alignment: int
) -> bytes:
    """Serialize the header of a file with `tensors` stored as `types`, padded to the alignment."""
    out = bytearray(MAGIC + struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(metadata)))

    def add_string(text: str) -> None:
        raw = text.encode()
        out.extend(struct.pack("<Q", len(raw)) + raw)

    for kv in metadata.values():
        add_string(kv.key)
        out.extend(kv.raw)
    offset = 0
    for tensor, qtype in zip(tensors, types):
        add_string(tensor.name)
        out.extend(struct.pack(f"<I{len(tensor.ne)}QIQ", len(tensor.ne), *tensor.ne, qtype, offset))
        offset += pad(tensor.bytes_as(qtype), alignment)
    return bytes(out).ljust(pad(len(out), alignment), b"\0")


def header_bytes(file: GGUFFile) -> int:
    """Return the size of a file's header."""
    return min((t.offset for t in file.tensors), default=file.n_bytes)
