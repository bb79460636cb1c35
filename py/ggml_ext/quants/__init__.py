"""numpy references of the weight types.

reference(type) has these functions on arrays (n_blocks, block_size) or (n_blocks, block_bytes):
    unpack(blocks)                        codes, scale and offset: the unpack contract
    dequantize_blocks(blocks)             weights
    quantize_blocks(weights, importance)  blocks with the same bytes as the C encoder; importance is optional, and options of
                                          the type follow
It is a Trellis of _trellis.py for the trellis types, and the module <type>.py for others.

Floating point follows the C sources operation by operation: IEEE float32, the same order of sums, no fused operations.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from .._base.types import TYPES
from ._blocks import BLOCK_SIZE, E5M3_MAX, HALF_MAX, SIGNS
from ._trellis import REFERENCES, Trellis

__all__ = ["BLOCK_SIZE", "E5M3_MAX", "HALF_MAX", "SIGNS", "reference"]


def reference(type_name: str) -> ModuleType | Trellis:
    """Return the reference of a weight type, by its lower-case name."""
    if TYPES[type_name].trellis_values:
        return REFERENCES[type_name]
    return importlib.import_module(f"{__name__}.{type_name}")
