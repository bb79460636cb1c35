// ITQ3_S in CUDA: thread k takes bytes 4*k ... 4*k + 3 of each bit plane.
#pragma once

#include "unpack.cuh"

namespace ggml_ext {

template <> struct unpacker<block_itq3_s> {
    static constexpr float offset          = 4; // near the zero points of all blocks
    static constexpr bool  own_offset      = true;
    static constexpr int   nibble_distance = 0;
    static __device__ __forceinline__ unpacked unpack(const block_itq3_s & x, int k) {
        static_assert(sizeof(block_itq3_s) % 4 == 0 && offsetof(block_itq3_s, ql) % 4 == 0, "words are aligned");
        const uint32_t * ql = (const uint32_t *) x.ql;
        const uint32_t   h  = ((const uint32_t *) x.qh)[k];
        unpacked u;
#pragma unroll
        for (int g = 0; g < N_WORDS; ++g) {
            const uint32_t high = g < 2 ? h << (2 - g) : h >> (g - 2);
            u.q[g] = (ql[k + N_THREADS<block_itq3_s>*(g/4)] >> 2*(g%4) & 0x03030303) | (high & 0x04040404);
        }
        u.d      = ggml_ext_half_to_float(x.d);
        u.offset = ggml_ext_half_to_float(x.z);
        return u;
    }
};

} // namespace ggml_ext
