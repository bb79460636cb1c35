// The 3-bit planes of types/bits3.h over the SIMD primitives.
#pragma once

#include "unpack.h"

namespace ggml_ext {

struct bits3 {
    u8x32 ql0, ql1, qh;

    bits3(const uint8_t * ql, const uint8_t * qh) : ql0(load(ql)), ql1(load(ql + 32)), qh(load(qh)) {}

    // codes of weights 32*G .. 32*G + 31
    template <int G> u8x32 group() const {
        return field<2*(G%4)>(G < 4 ? ql0 : ql1, 3) | field<G - 2>(qh, 4);
    }
};

} // namespace ggml_ext
