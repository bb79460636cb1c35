"""Registers the ggml-ext types with the `gguf` package at run time.

gguf looks types up in three tables: the enum GGMLQuantizationType, GGML_QUANT_SIZES and the classes registered with gguf.quants.
LlamaFileType names general.file_type.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

import gguf
import gguf.quants
import numpy as np

from .. import quants
from .._base.types import TYPES, TypeInfo

Enum = TypeVar("Enum", bound=IntEnum)

Q2_0_ID, Q2_0_FILE_ID, Q2_0_SIZES = 42, 41, (64, 18)  # llama.cpp's Q2_0, which gguf 0.19 lacks

# gguf's base class of quantizations has no public name.
_QuantBase: Any = gguf.quants.Q8_0.__base__


def add_enum_member(enum: type[Enum], name: str, value: int) -> Enum:
    """Add a member to a finished IntEnum, for look-up by value, name and attribute and for iteration; enum has no public way to do so.

    Adding the same member again changes nothing. ImportError if the name or the value is taken, as by a later gguf release.
    """
    by_value, by_name = enum._value2member_map_.get(value), enum.__members__.get(name)
    if by_name is not None and by_value is by_name:
        return by_name
    if by_value is not None or by_name is not None:
        raise ImportError(
            f"gguf defines {enum.__name__} {by_value or by_name!r} already, which clashes with {name} = {value} "
            "of ggml_ext: use the gguf release that this version of ggml_ext names"
        )
    member = int.__new__(enum, value)
    for attribute, content in (("_name_", name), ("_value_", value), ("_sort_order_", len(enum._member_names_)), ("__objclass__", enum)):
        setattr(member, attribute, content)
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    getattr(enum, "_hashable_values_", []).append(value)  # Python 3.13 asks this list for `value in enum`
    return member


def _register_quants(info: TypeInfo, qtype: gguf.GGMLQuantizationType) -> None:
    reference = quants.reference(info.name)

    class Quant(_QuantBase, qtype=qtype):  # type: ignore[call-arg]  # mypy does not see __init_subclass__ of a base of type Any
        @classmethod
        def quantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return reference.quantize_blocks(blocks)

        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            return reference.dequantize_blocks(blocks)

    Quant.__name__ = Quant.__qualname__ = info.name.upper()


def extend_gguf() -> None:
    """Register all types with gguf; repeated calls change nothing."""
    gguf.GGML_QUANT_SIZES[add_enum_member(gguf.GGMLQuantizationType, "Q2_0", Q2_0_ID)] = Q2_0_SIZES
    add_enum_member(gguf.LlamaFileType, "MOSTLY_Q2_0", Q2_0_FILE_ID)
    for info in TYPES.values():
        qtype = add_enum_member(gguf.GGMLQuantizationType, info.name.upper(), int(info.id))
        gguf.GGML_QUANT_SIZES[qtype] = (info.block_size, info.block_bytes)
        if info.kind == "weight":
            add_enum_member(gguf.LlamaFileType, f"MOSTLY_{info.name.upper()}", int(info.id))
            if qtype not in gguf.quants._type_traits:
                _register_quants(info, qtype)
