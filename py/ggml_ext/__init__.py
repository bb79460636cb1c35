"""Low-bit weight types for llama.cpp: quantizer, numpy references and the extended ggml libraries.

Importing the package registers its types with `gguf`, so that GGUFReader, GGUFWriter and gguf.quants support its files. The functions of
api.py are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._base.errors import UserError
from ._base.package import __version__
from ._base.types import TYPES, WEIGHT_TYPES, ExtType, TypeInfo
from ._formats.gguf_types import extend_gguf

if TYPE_CHECKING:
    from .api import evaluate_models, export_model, inspect_model, quantize_model

extend_gguf()

__all__ = [
    "TYPES", "WEIGHT_TYPES", "ExtType", "TypeInfo", "UserError", "__version__", "evaluate_models", "export_model", "inspect_model", "quantize_model",
]
_FUNCTIONS = ("evaluate_models", "export_model", "inspect_model", "quantize_model")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
