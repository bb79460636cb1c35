// Checks of supports_op for ggml-ext types, for C, C++ and Objective-C.
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

// Operations without computation: any backend's buffers may hold tensors of any type.
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

// Whether op reads or writes values of ggml-ext types. A backend without kernels must refuse it, so that the scheduler picks another.
static inline bool ggml_ext_op_needs_kernels(const struct ggml_tensor * op) {
    if (ggml_ext_op_names_memory(op)) {
        return false; // left to the backend's own rule
    }
    bool uses_ext_type = ggml_ext_is_ext_type(op->type);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        uses_ext_type = uses_ext_type || (op->src[i] && ggml_ext_is_ext_type(op->src[i]->type));
    }
    return uses_ext_type;
}
