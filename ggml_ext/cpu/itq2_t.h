// ITQ2_T over the SIMD primitives. Format: types/itq2_t.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

template <> struct unpacker<block_itq2_t> {
    trellis_pairs pairs;
    float         d;
    static constexpr float offset = GGML_EXT_ITQ2_T_TRELLIS_OFFSET;

    explicit unpacker(const block_itq2_t & x) : pairs(x.start, x.ql), d(e5m3_to_float(x.d)) {}

    template <int G> u8x32 group() const {
        return trellis_values(ggml_ext_itq2_t_tables, pairs.get<G>(), pairs.get<G - 4>(), pairs.get<G - 2>());
    }
};

} // namespace ggml_ext
