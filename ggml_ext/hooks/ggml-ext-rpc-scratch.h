// For ggml-rpc.cpp: an addition to the key of its cache of allocation sizes. Metal rotates the activations of products with ggml-ext
// types into scratch memory after the result, so the size depends on the activations' shape. Upstream's key has only the result's.
// The addition is zero for other types.
#pragma once

#include "ggml-ext-supports.h"

struct ggml_ext_rpc_scratch_key {
    int64_t type;
    int64_t ne[GGML_MAX_DIMS];
};

static inline ggml_ext_rpc_scratch_key ggml_ext_rpc_get_scratch_key(const ggml_tensor * op) {
    ggml_ext_rpc_scratch_key key = {};
    if (op->src[0] && op->src[1] && ggml_ext_is_ext_type(op->src[0]->type)) {
        key.type = op->src[0]->type;
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            key.ne[i] = op->src[1]->ne[i];
        }
    }
    return key;
}
