// DITTO3 in CUDA: one byte permute looks up four nibbles in the eight codebook values.
#pragma once

#include "unpack.cuh"

namespace ggml_ext {

template <> struct unpacker<block_ditto3> {
    static constexpr float offset          = DITTO3_OFFSET;
    static constexpr bool  own_offset      = false;
    static constexpr int   nibble_distance = 2;
    static __device__ __forceinline__ unpacked unpack(const block_ditto3 & x, int k) {
        const block_words words(&x);
        static_assert(offsetof(block_ditto3, codebook) == 2 && offsetof(block_ditto3, ql) == 10 && offsetof(block_ditto3, qh) == 74, "");
        const uint32_t low = words[0] & 0x7f7f7f7f, high = words[1] & 0x7f7f7f7f;
        const uint32_t h   = words[18 + k];
        unpacked u;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t l = words[2 + 8*half + k];
#pragma unroll
            for (int g = 4*half; g < 4*half + 2; ++g) { // nibbles alternate between groups g and g + 2
                const uint32_t h0 = g < 2 ? h << (2 - g) : h >> (g - 2); // bit g of each byte at bit 2
                const uint32_t h2 = g < 5 ? h << (4 - g) : h >> (g - 4); // bit g + 2 at bit 6
                const uint32_t i  = (l >> 2*(g%4) & 0x33333333) | (h0 & 0x04040404) | (h2 & 0x40404040);
                u.q[g]     = __byte_perm(low, high, i);
                u.q[g + 2] = __byte_perm(low, high, i >> 16);
            }
        }
        u.d      = ggml_ext_half_to_float(ggml_ext_half_from_bits((uint16_t) words.header()));
        u.offset = offset;
        return u;
    }
};

} // namespace ggml_ext
