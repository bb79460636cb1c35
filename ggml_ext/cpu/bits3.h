// The 3-bit planes of types/bits3.h over the SIMD primitives, for blocks of 256.
#pragma once

#include "unpack.h"

namespace ggml_ext {

struct bits3 {
    u8x64 ql, qh; // qh: the high bits in bits 0-3 of each byte; low half: groups 0-3, high half: groups 4-7

    bits3(const uint8_t * ql, const uint8_t * qh) : ql(load64(ql)), qh(join(load(qh), field<4>(load(qh), 15))) {}

    // Return the codes of groups G and G + 4. field<G - 2> moves the high bit to bit 2; a negative shift goes left (simd.h).
    template <int G> u8x64 groups() const { return field<2*G>(ql, 3) | field<G - 2>(qh, 4); }
};

} // namespace ggml_ext
