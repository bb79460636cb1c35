// ITQ3_T on the device: the trellis code with 3 bits a symbol.
#pragma once

#include "trellis.cuh"

namespace ggml_ext {

template <> struct unpacker<block_itq3_t> {
    static constexpr float offset     = GGML_EXT_ITQ3_T_TRELLIS_OFFSET;
    static constexpr bool  own_offset = false;
    static __device__ __forceinline__ unpacked unpack(const block_itq3_t & x, int k) {
        constexpr ggml_ext_trellis_tables tables = GGML_EXT_ITQ3_T_TRELLIS_TABLES;
        const block_words words(&x);
        static_assert(offsetof(block_itq3_t, ql) == 2 && offsetof(block_itq3_t, qh) == 66, "");
        const uint32_t header = words.header(), start = header >> 8 & 0xff;
        const auto l1 = words.at(8 + k), h = words.at(16 + k);
        const trellis_words l = {words[k], l1.word, with_first(l1.before, k, start)};
        const uint32_t h_before = with_first(h.before, k, (start & 3) << 6);
        unpacked u;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            // bits g - 3 ... g of the high bits, those of the byte before first
            const uint32_t quad = g == 3 ? h.word : select(h_before >> (5 + g), h.word << (3 - g), 0x01010101*(0x7 >> g));
            trellis_codes(tables, l.pair2(g), l.pair(g), quad, u.q[g], u.q[g + 4]);
        }
        u.d      = ggml_ext_e5m3_to_float((uint8_t) header);
        u.offset = offset;
        return u;
    }
};

} // namespace ggml_ext
