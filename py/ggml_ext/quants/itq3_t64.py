"""ITQ3_T64 in numpy: the format of ggml_ext/types/itq3_t64.h. All is in _trellis.py."""

from ._trellis import Trellis

TRELLIS = Trellis("itq3_t64", 3)
unpack = TRELLIS.unpack
dequantize_blocks = TRELLIS.dequantize_blocks
quantize_blocks = TRELLIS.quantize_blocks
