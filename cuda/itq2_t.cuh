// ITQ2_T on the device: the trellis code with 2 bits a symbol.
#pragma once

#include "trellis.cuh"

namespace ggml_ext {

template <> struct unpacker<block_itq2_t> {
    static constexpr float offset     = GGML_EXT_ITQ2_T_TRELLIS_OFFSET;
    static constexpr bool  own_offset = false;
    static __device__ __forceinline__ unpacked unpack(const block_itq2_t & x, int k) {
        constexpr ggml_ext_trellis_tables tables = GGML_EXT_ITQ2_T_TRELLIS_TABLES;
        const block_words words(&x);
        static_assert(offsetof(block_itq2_t, ql) == 2, "");
        const uint32_t header = words.header(), start = header >> 8 & 0xff;
        const auto l0 = words.at(k), l1 = words.at(8 + k);
        const trellis_words l  = {l0.word, l1.word, with_first(l1.before, k, start)};
        const trellis_words l4 = {l.before, l.l0, with_first(l0.before, k, 0)}; // four steps earlier: pair(t - 4)
        unpacked u;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            trellis_codes(tables, l.pair(g), l4.pair(g), l.pair2(g), u.q[g], u.q[g + 4]);
        }
        u.d      = ggml_ext_e5m3_to_float((uint8_t) header);
        u.offset = offset;
        return u;
    }
};

} // namespace ggml_ext
