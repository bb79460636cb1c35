// ITQ4_T on the device: the trellis code with 4 bits a symbol.
#pragma once

#include "trellis.cuh"

namespace ggml_ext {

template <> struct unpacker<block_itq4_t> {
    static constexpr float offset     = GGML_EXT_ITQ4_T_TRELLIS_OFFSET;
    static constexpr bool  own_offset = false;
    static constexpr int   pairs      = trellis_pairs(4);
    static __device__ __forceinline__ unpacked unpack(const block_itq4_t & x, int k) {
        constexpr ggml_ext_trellis_tables tables = GGML_EXT_ITQ4_T_TRELLIS_TABLES;
        return unpack_trellis<block_itq4_t, 4>(x, k, tables, offset);
    }
};

} // namespace ggml_ext
