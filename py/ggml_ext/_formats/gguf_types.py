"""Teaches the `gguf` package our types at run time.

`gguf` decides by three tables: the IntEnum GGMLQuantizationType (which a reader looks up by value), GGML_QUANT_SIZES
and the classes registered with gguf.quants. LlamaFileType names general.file_type.
"""

from __future__ import annotations

from enum import IntEnum

import gguf
import gguf.quants
import numpy as np

from .. import quants
from .._base.types import TYPES, TypeInfo

# The base of gguf's quantization classes has no public name.
_QuantBase = gguf.quants.Q8_0.__base__


def add_enum_member(enum: type[IntEnum], name: str, value: int) -> IntEnum:
    """Adds a member to a finished IntEnum: reachable by value, by name, as attribute and in iteration.

    enum has no public way to extend a class that has members. Adding the same member again changes nothing; raises
    ImportError if the name or the value means something else already, as a later gguf release might do.
    """
    by_value, by_name = enum._value2member_map_.get(value), enum.__members__.get(name)
    if by_value is not None and by_value is by_name:
        return by_value
    if by_value is not None or by_name is not None:
        raise ImportError(
            f"gguf defines {enum.__name__} {by_value or by_name!r} already, which clashes with {name} = {value} "
            "of ggml_ext: use the gguf release that this version of ggml_ext names"
        )
    member = int.__new__(enum, value)
    member._name_ = name
    member._value_ = value
    member._sort_order_ = len(enum._member_names_)
    member.__objclass__ = enum
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # Python 3.13 asks this list for `value in enum`
        enum._hashable_values_.append(value)
    return member


def _register_quants(info: TypeInfo, qtype: IntEnum) -> None:
    reference = quants.reference(info.name)

    class Quant(_QuantBase, qtype=qtype):
        @classmethod
        def quantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return reference.quantize_blocks(blocks)

        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return reference.dequantize_blocks(blocks)

    Quant.__name__ = Quant.__qualname__ = info.name.upper()


def extend_gguf() -> None:
    """Adds all types to gguf; safe to call again."""
    for info in TYPES.values():
        qtype = add_enum_member(gguf.GGMLQuantizationType, info.name.upper(), int(info.id))
        gguf.GGML_QUANT_SIZES[qtype] = (info.block_size, info.block_bytes)
        if info.kind == "weight":
            add_enum_member(gguf.LlamaFileType, f"MOSTLY_{info.name.upper()}", int(info.id))
            if qtype not in gguf.quants._type_traits:
                _register_quants(info, qtype)
