// DITTO5 in CUDA: two byte permutes look up four nibbles in the upper half of the codebook (unpack.cuh).
// A permute takes 16 bits of selectors, so 2-byte loads need neither 4-byte alignment nor shifts.
#pragma once

#include "unpack.cuh"

namespace ggml_ext {

template <> struct unpacker<block_ditto5> {
    static constexpr float offset          = DITTO5_OFFSET;
    static constexpr bool  own_offset      = false;
    static constexpr int   nibble_distance = 1;
    static __device__ __forceinline__ unpacked unpack(const block_ditto5 & x, int k) {
        static_assert(offsetof(block_ditto5, ql) % 2 == 0 && offsetof(block_ditto5, qh) % 2 == 0, "loads of two bytes");
        constexpr uint8_t upper_half[] = GGML_EXT_DITTO5_CODEBOOK;
        const lookup16 codebook(upper_half);
        const uint16_t * ql = (const uint16_t *) x.ql + 2*k, * qh = (const uint16_t *) x.qh + 2*k;
        const uint32_t h = qh[0] | (uint32_t) qh[1] << 16;
        unpacked u;
#pragma unroll
        for (int g = 0; g < N_WORDS; g += 2) { // nibbles alternate between groups g and g + 1
            const uint16_t * l = ql + 32*(g%4/2) + 16*(g/4);
            const uint32_t h0 = h << (7 - g), h1 = h << (6 - g); // bit g or g + 1 of each byte as its top bit
            u.q[g]     = (codebook.low(l[0]) | codebook.high(l[0])) ^ (prmt(h0, h1, 0xd9c8) & 0x7f7f7f7f); // lower half: complement
            u.q[g + 1] = (codebook.low(l[1]) | codebook.high(l[1])) ^ (prmt(h0, h1, 0xfbea) & 0x7f7f7f7f);
        }
        u.d      = ggml_ext_half_to_float(x.d);
        u.offset = offset;
        return u;
    }
};

} // namespace ggml_ext
