// ITQ4_T over the SIMD primitives. Format: types/itq4_t.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER(ITQ4_T, itq4_t, 4)

} // namespace ggml_ext
