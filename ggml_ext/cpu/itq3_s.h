// ITQ3_S over the SIMD primitives. Bit map: types/itq3_s.h.
#pragma once

#include "unpack.h"

namespace ggml_ext {

template <> struct unpacker<block_itq3_s> {
    u8x32 ql0, ql1, qh;
    float d, offset;

    explicit unpacker(const block_itq3_s & x)
        : ql0(load(x.ql)), ql1(load(x.ql + 32)), qh(load(x.qh)), d(half_to_float(x.d)), offset(half_to_float(x.z)) {}

    // codes of weights 32*G .. 32*G + 31
    template <int G> u8x32 group() const {
        return field<2*(G%4)>(G < 4 ? ql0 : ql1, 3) | field<G - 2>(qh, 4);
    }
};

} // namespace ggml_ext
