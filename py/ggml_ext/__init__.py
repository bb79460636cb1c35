"""Low-bit weight types for llama.cpp: quantizer, numpy references and, where built, the extended ggml libraries.

Importing the package teaches `gguf` the types of the extension, so that GGUFReader, GGUFWriter, gguf.quants and
gguf-dump work on its files.
"""

from importlib import metadata

from ._gguf_types import extend_gguf
from ._types import TYPES, WEIGHT_TYPES, ExtType, TypeInfo

try:
    __version__ = metadata.version("ggml-ext")
except metadata.PackageNotFoundError:  # the source tree on PYTHONPATH
    __version__ = "0+uninstalled"

extend_gguf()

__all__ = ["TYPES", "WEIGHT_TYPES", "ExtType", "TypeInfo", "__version__"]
