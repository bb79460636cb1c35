// types.toml as C++ traits, for the CPU and CUDA.
#pragma once

#include "ggml-ext-base.h"

#ifdef __CUDACC__
#define GGML_EXT_HOST_DEVICE __host__ __device__
#else
#define GGML_EXT_HOST_DEVICE
#endif

namespace ggml_ext {

template <typename B> struct traits;       // by block struct
template <ggml_type type> struct block_of; // by ggml_type

#define GGML_EXT_X(NAME, name)                                                  \
    template <> struct traits<block_##name> {                                   \
        static constexpr ggml_type type       = GGML_TYPE_##NAME;               \
        static constexpr int       block_size = GGML_EXT_##NAME##_BLOCK_SIZE;   \
        static constexpr int       q_min      = GGML_EXT_##NAME##_UNPACK_MIN;   \
        static constexpr int       q_max      = GGML_EXT_##NAME##_UNPACK_MAX;   \
        static constexpr int       group      = GGML_EXT_##NAME##_GROUP;        \
        static constexpr int       n_groups   = block_size/group;               \
        static constexpr bool      rotated    = GGML_EXT_##NAME##_ROTATED;      \
    };                                                                          \
    template <> struct block_of<GGML_TYPE_##NAME> { typedef block_##name type; };
GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X

constexpr GGML_EXT_HOST_DEVICE bool is_weight_type(ggml_type type) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES return true;
        default:              return false;
    }
}

// Weights per block; 0 for upstream types.
constexpr GGML_EXT_HOST_DEVICE int block_size_of(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return GGML_EXT_##NAME##_BLOCK_SIZE;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return 0;
    }
}

constexpr GGML_EXT_HOST_DEVICE bool is_rotated(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return GGML_EXT_##NAME##_ROTATED;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return false;
    }
}

} // namespace ggml_ext
