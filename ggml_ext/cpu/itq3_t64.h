// ITQ3_T64 over the SIMD primitives. Format: types/itq3_t64.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER64(ITQ3_T64, itq3_t64, 3)

} // namespace ggml_ext
