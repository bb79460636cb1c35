"""Convert a LoRA adapter for a model with column scales, for programs that do not know them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .._base.errors import UserError
from .._base.files import open_file, write_atomically
from .._base.option import option
from .._formats.chunks import row_chunks
from .._formats.column_scales import KEY, ColumnScales, ScaledFile
from .._formats.gguf_file import GGUFFile, pack_header, pad, string_value
from .._formats.reserved_paths import ReservedPaths, reserve_output
from .._formats.split import open_model
from .._formats.tensor_types import FLOAT_TYPES

A, B = ".lora_a", ".lora_b"  # ends of the names of an adapter's tensors
SCALED_FOR = "ggml_ext.scaled_for"  # key of a converted adapter: the hash of the scales of its model


@dataclass(frozen=True, kw_only=True)
class ScaleAdapterOptions:
    """Options of `ggml-ext scale-adapter`."""

    model: Path = option(is_positional=True, metavar="MODEL", help="GGUF model with column scales")
    adapter: Path = option(is_positional=True, metavar="ADAPTER", help="LoRA adapter of the original model (GGUF)")
    out: Path = option(is_positional=True, metavar="OUT", help="adapter to write")
    force: bool = option(False, short="-f", help="replace OUT if it exists")


def scale_adapter(options: ScaleAdapterOptions) -> str:
    """Write the adapter and return a line for the user. UserError if the files do not fit each other."""
    model, adapter = open_model(options.model), GGUFFile(options.adapter)
    scales = ColumnScales.read(model)
    if not scales:
        raise UserError(f"{options.model} has no column scales: use the adapter as it is")
    if adapter.value("general.type") != "adapter":
        raise UserError(f"{options.adapter} is not an adapter: convert one with llama.cpp's convert_lora_to_gguf.py")
    if SCALED_FOR in adapter.metadata:
        raise UserError(f"{options.adapter} has the scales of a model already: pass the adapter of the original model")
    out = reserve_output(ReservedPaths({options.model: "MODEL", options.adapter: "ADAPTER"}), options.out, options.force).out
    assert out is not None
    mark = string_value(SCALED_FOR, hash_entry(str(model.value(KEY))))
    scaled = ScaledFile(adapter, scales_of_adapter(adapter, scales))
    try:
        with write_atomically(out, options.force) as part, open_file(part) as f:
            tensors = adapter.tensors
            f.write(pack_header(adapter.metadata | {SCALED_FOR: mark}, tensors, [t.type for t in tensors], adapter.alignment))
            for tensor in tensors:
                for chunk in row_chunks(tensor):
                    f.write(scaled.rows(tensor, *chunk).data)
                f.write(bytes(pad(tensor.n_bytes, adapter.alignment) - tensor.n_bytes))
    except OSError as e:
        raise UserError(f"OUT: cannot write {options.out}: {e.strerror}") from e
    return f"{options.out}: for {options.model.name} in any llama.cpp"


def hash_entry(text: str) -> str:
    """Return FNV-1a, 64 bits, as 16 hexadecimal digits, like ggml_ext/hooks/ggml-ext-column-scales.h."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def scales_of_adapter(adapter: GGUFFile, scales: ColumnScales) -> ColumnScales:
    """Return the scales of the adapter's tensors: those of columns for A, those of rows for B. UserError if they do not fit."""
    columns = {name + A: exponents for name, exponents in scales.columns.items()}
    rows = {name + B: exponents for name, exponents in scales.rows.items()}
    for tensor in adapter.tensors:
        exponents, n = columns.get(tensor.name), tensor.ne[0]
        if exponents is None and (exponents := rows.get(tensor.name)) is not None:
            n = tensor.n_rows
        if exponents is not None and len(exponents) != n:
            raise UserError(f"tensor {tensor.name} of {adapter.path} has {n:,} values for {len(exponents):,} scales of {KEY}: it is for another model")
        if exponents is not None and tensor.type not in FLOAT_TYPES:
            raise UserError(f"tensor {tensor.name} of {adapter.path} is {tensor.type.name.lower()}, must be f32, f16 or bf16: convert the adapter again")
    return ColumnScales(columns, rows)
