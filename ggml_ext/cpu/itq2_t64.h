// ITQ2_T64 over the SIMD primitives. Format: types/itq2_t64.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

GGML_EXT_TRELLIS_UNPACKER64(ITQ2_T64, itq2_t64, 2)

} // namespace ggml_ext
