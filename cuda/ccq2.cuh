// CCQ2 in CUDA: one multiplication computes the 15-bit codes of two bytes.
#pragma once

#include "unpack.cuh"

namespace ggml_ext {

template <> struct unpacker<block_ccq2> {
    static constexpr float offset          = CCQ2_OFFSET;
    static constexpr bool  own_offset      = false;
    static constexpr int   nibble_distance = 0;
    static __device__ __forceinline__ unpacked unpack(const block_ccq2 & x, int k) {
        const block_words words(&x);
        static_assert(offsetof(block_ccq2, scales) == 1 && offsetof(block_ccq2, qs) == 2, "");
        constexpr uint32_t BETA = CCQ2_BETA << 16 | CCQ2_BETA;
        unpacked u;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t w    = words[8*half + k];
            const uint32_t even = (w      & 0x00ff00ff)*CCQ2_ALPHA + BETA; // codes of bytes 0 and 2, each below 1 << 15
            const uint32_t odd  = (w >> 8 & 0x00ff00ff)*CCQ2_ALPHA + BETA;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int      s = 9 - 3*i;
                const uint32_t o = s < 8 ? odd << (8 - s) : odd >> (s - 8);
                u.q[4*half + i] = (even >> s & 0x003f003f) | (o & 0x3f003f00);
            }
        }
        const uint32_t header = words.header();
#pragma unroll
        for (int g = 0; g < GGML_EXT_MAX_GROUPS; ++g) {
            u.scale[g] = __byte_perm(CCQ2_SCALES, 0, (header >> (8 + 2*g) & 3) | 0x4440); // one byte, zero-extended
        }
        u.d      = ggml_ext_e5m3_to_float((uint8_t) header);
        u.offset = offset;
        return u;
    }
};

} // namespace ggml_ext
