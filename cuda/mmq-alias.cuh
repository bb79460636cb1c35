// Which of upstream's configurations and tile layouts serves a type in MMQ.
#pragma once

#include "all.cuh"

namespace ggml_ext {

// Tiles of int8 with a float scale for 32 weights (IQ3_S); for zero points that are each block's own, and no integers, with
// scale and minimum (Q5_1). Other types than ours as they are.
constexpr __host__ __device__ ggml_type mmq_alias(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return unpacker<block_##name>::own_offset ? GGML_TYPE_Q5_1 : GGML_TYPE_IQ3_S;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return type;
    }
}

} // namespace ggml_ext
