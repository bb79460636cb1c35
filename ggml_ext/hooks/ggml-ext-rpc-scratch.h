// What ggml-rpc.cpp adds to the key of its cache of allocation sizes. Metal rotates the activations of products with our types into
// room behind the result, whose size follows from the activations' shape: upstream's key knows the result's alone, and a product
// of wider activations would be given the room of a narrower one. Of other types nothing is added.
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
