// ITQ2_T over the SIMD primitives. Format: types/itq2_t.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER(ITQ2_T, itq2_t, 2)

} // namespace ggml_ext
