// ITQ2_T64 on the device: the trellis code with 2 bits a symbol, in blocks of 64.
#pragma once

#include "trellis.cuh"

namespace ggml_ext {

template <> struct unpacker<block_itq2_t64> {
    static constexpr float offset     = GGML_EXT_ITQ2_T64_TRELLIS_OFFSET;
    static constexpr bool  own_offset = false;
    static constexpr int   pairs      = trellis_pairs(2);
    static __device__ __forceinline__ unpacked unpack(const block_itq2_t64 & x, int k) {
        constexpr ggml_ext_trellis_tables tables = GGML_EXT_ITQ2_T64_TRELLIS_TABLES;
        return unpack_trellis<block_itq2_t64, 2>(x, k, tables, offset);
    }
};

} // namespace ggml_ext
