// ITQ3_T over the SIMD primitives. Format: types/itq3_t.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER(ITQ3_T, itq3_t, 3)

} // namespace ggml_ext
