// The trellis code of types/trellis.h over the SIMD primitives.
#pragma once

#include "unpack.h"

namespace ggml_ext {

// The pairs of low bits.
struct trellis_pairs {
    u8x32 ql0, ql1;       // groups 0 to 3 and 4 to 7
    u8x32 before0, before1; // of the lane before each

    trellis_pairs(uint8_t start, const uint8_t * ql)
        : ql0(load(ql)), ql1(load(ql + 32)), before0(shift_lanes(ql0, 0)), before1(shift_lanes(ql1, start)) {}

    // of group G and the one before it; a negative G is G + 8 of the lane before
    template <int G> u8x32 get() const {
        if constexpr (G == -4) { return field<6>(before0, 3) | field<-2>(before1, 12); }
        else if constexpr (G <  0) { return field<2*(G + 3)>(before1, 15); }
        else if constexpr (G == 0) { return field<6>(before1, 3) | field<-2>(ql0, 12); }
        else if constexpr (G <  4) { return field<2*(G - 1)>(ql0, 15); }
        else if constexpr (G == 4) { return field<6>(ql0, 3) | field<-2>(ql1, 12); }
        else                       { return field<2*(G - 5)>(ql1, 15); }
    }
};

static inline u8x32 trellis_values(const ggml_ext_trellis_tables & t, u8x32 a, u8x32 b, u8x32 e) {
    const u8x32 i0 = a ^ look_up(load_table16(t.mix[0]), b), i1 = e ^ look_up(load_table16(t.mix[1]), b);
    return look_up(load_table16(t.values[0]), i0) + look_up(load_table16(t.values[1]), i1);
}

} // namespace ggml_ext
