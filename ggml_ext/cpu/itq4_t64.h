// ITQ4_T64 over the SIMD primitives. Format: types/itq4_t64.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER64(ITQ4_T64, itq4_t64, 4)

} // namespace ggml_ext
