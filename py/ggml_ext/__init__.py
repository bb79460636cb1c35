"""Low-bit weight types for llama.cpp: quantizer, numpy references and, where built, the extended ggml libraries.

Importing the package teaches `gguf` the types of the extension, so that GGUFReader, GGUFWriter, gguf.quants and
gguf-dump work on its files.
"""

from ._base.package import __version__
from ._base.types import TYPES, WEIGHT_TYPES, ExtType, TypeInfo
from ._formats.gguf_types import extend_gguf

extend_gguf()

__all__ = ["TYPES", "WEIGHT_TYPES", "ExtType", "TypeInfo", "__version__"]
