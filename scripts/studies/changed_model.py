"""Write a GGUF file with other weights and metadata."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def copy_field(writer: gguf.GGUFWriter, name: str, field: gguf.ReaderField, value: Any = None) -> None:
    """Add an entry of another file's metadata, with another value unless it is None."""
    kind = field.types[0]
    writer.add_key_value(name, field.contents() if value is None else value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, name, field)


def write_changed(reader: gguf.GGUFReader, path: Path, tensors: Iterable[tuple[str, np.ndarray]], changed: Mapping[str, Any]) -> None:
    """Write the metadata of a file, with `changed` values by key, and `tensors`, by name."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            copy_field(writer, name, field, changed.get(name))
    for name, values in tensors:
        writer.add_tensor(name, values)
    finish(writer)
