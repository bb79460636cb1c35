// E5M3: unsigned floats of one byte for block scales, a half without its sign and its low seven mantissa bits, times 2^-8.
// The factor moves the normal range to 2^-22 .. 240, the range of block scales.
#pragma once

#include "../ggml-ext-common.h"

#define GGML_EXT_E5M3_FACTOR (1.0f/256)
enum { GGML_EXT_E5M3_MAX = 0xf7 }; // above: Inf and NaN

GGML_EXT_INLINE ggml_half ggml_ext_e5m3_half(uint8_t d) {
    return ggml_ext_half_from_bits((uint16_t) (d << 7));
}

GGML_EXT_INLINE float ggml_ext_e5m3_to_float(uint8_t d) {
    return ggml_ext_half_to_float(ggml_ext_e5m3_half(d))*GGML_EXT_E5M3_FACTOR;
}
