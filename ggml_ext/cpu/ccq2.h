// CCQ2 over the SIMD primitives (format: types/ccq2.h).
#pragma once

#include "unpack.h"

namespace ggml_ext {

template <> struct unpacker<block_ccq2> {
    u15x32  codes0, codes1; // first and last 128 weights
    scales4 scales;
    uint8_t indices;
    float   d;
    static constexpr float offset = CCQ2_OFFSET;

    explicit unpacker(const block_ccq2 * x)
        : codes0(multiply_add<CCQ2_ALPHA, CCQ2_BETA>(load(x->qs))), codes1(multiply_add<CCQ2_ALPHA, CCQ2_BETA>(load(x->qs + 32))),
          scales(look_up_scales(CCQ2_SCALES, x->scales)), indices(x->scales), d(e5m3_to_float(x->d)) {}

    template <int G> u8x32 group() const { return field<9 - 3*(G%4)>(G < 4 ? codes0 : codes1); }

    int scale(int g) const { return ggml_ext_ccq2_scale(indices >> 2*g & 3); }
};

} // namespace ggml_ext
