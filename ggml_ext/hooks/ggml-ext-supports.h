// What a backend without kernels for the extension's types answers in supports_op: C, C++ and Objective-C.
#pragma once

#include "ggml.h"

static inline bool ggml_ext_is_ext_type(enum ggml_type type) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES
        GGML_EXT_ACTIVATION_CASES
            return true;
        default:
            return false;
    }
}

// Operations that only name memory, of which tensors of any type may lie in a backend's buffers
static inline bool ggml_ext_op_names_memory(const struct ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return true;
        default:
            return false;
    }
}

// True if op reads or writes values of our types: such a backend has to refuse it, then the scheduler gives it to another.
static inline bool ggml_ext_op_needs_kernels(const struct ggml_tensor * op) {
    if (ggml_ext_op_names_memory(op)) {
        return false; // left to the backend's own rule
    }
    bool found = ggml_ext_is_ext_type(op->type);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        found = found || (op->src[i] && ggml_ext_is_ext_type(op->src[i]->type));
    }
    return found;
}
