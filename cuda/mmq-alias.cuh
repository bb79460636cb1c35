// The upstream type whose MMQ configuration and tile layout a ggml-ext type uses.
#pragma once

#include "all.cuh"

namespace ggml_ext {

// IQ3_S: int8 with one float scale per 32 weights. Q5_1: scale and minimum, for types whose blocks have zero points of their own.
// Upstream types map to themselves.
constexpr __host__ __device__ ggml_type mmq_alias(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return unpacker<block_##name>::own_offset ? GGML_TYPE_Q5_1 : GGML_TYPE_IQ3_S;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return type;
    }
}

} // namespace ggml_ext
