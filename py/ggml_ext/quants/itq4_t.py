"""ITQ4_T in numpy: the format of ggml_ext/types/itq4_t.h. All is in _trellis.py."""

from ._trellis import Trellis

TRELLIS = Trellis("itq4_t", 4)
unpack = TRELLIS.unpack
dequantize_blocks = TRELLIS.dequantize_blocks
quantize_blocks = TRELLIS.quantize_blocks
