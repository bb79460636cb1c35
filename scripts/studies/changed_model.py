"""Write a GGUF file with other weights and metadata."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_changed(reader: gguf.GGUFReader, path: Path, tensors: Iterable[tuple[str, np.ndarray]], changed: Mapping[str, Any]) -> None:
    """Write the metadata of a file, with `changed` values by key, and `tensors`, by name."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, field.contents()), kind, sub)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
