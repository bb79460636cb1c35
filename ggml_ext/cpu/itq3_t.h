// ITQ3_T over the SIMD primitives. Format: types/itq3_t.h.
#pragma once

#include "trellis.h"

namespace ggml_ext {

template <> struct unpacker<block_itq3_t> {
    trellis_pairs pairs;
    u8x32         qh, qh_before; // before: bits 4 to 7 of the lane before this one, and 0 to 3 of this
    float         d;
    static constexpr float offset = GGML_EXT_ITQ3_T_TRELLIS_OFFSET;

    explicit unpacker(const block_itq3_t & x)
        : pairs(x.start, x.ql), qh(load(x.qh)),
          qh_before(field<4>(shift_lanes(qh, (uint8_t) (x.start << 6)), 15) | field<-4>(qh, 0xf0)), d(e5m3_to_float(x.d)) {}

    template <int G> u8x32 quad() const {
        if constexpr (G < 3) { return field<G + 1>(qh_before, 15); } else { return field<G - 3>(qh, 15); }
    }
    template <int G> u8x32 group() const {
        return trellis_values(ggml_ext_itq3_t_tables, pairs.get<G - 2>(), pairs.get<G>(), quad<G>());
    }
};

} // namespace ggml_ext
