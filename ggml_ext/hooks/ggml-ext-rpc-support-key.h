// What an answer of ggml-ext-rpc.h is kept for: all that a device's answer depends on. A question in the middle of a run waits for all work of
// the server, so the number of tokens is no part of it, unless a tensor is larger than Vulkan promises buffers to be (maxStorageBufferRange).
#pragma once

#include "ggml-ext-supports.h"

#include <vector>

static inline std::vector<int64_t> ggml_ext_rpc_question(uint32_t device, const ggml_tensor * op) {
    std::vector<int64_t> question = { device, op->op };
    question.insert(question.end(), op->op_params, op->op_params + 4);
    const auto add = [&](const ggml_tensor * t) {
        const int64_t n_bytes = (int64_t) ggml_nbytes(t);
        question.insert(question.end(), { t->type, t->ne[0], (int64_t) t->nb[0], n_bytes < 1 << 27 ? 0 : n_bytes });
        if (ggml_ext_is_ext_type(t->type)) {
            question.insert(question.end(), t->ne + 1, t->ne + GGML_MAX_DIMS);
        }
    };
    add(op);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i]) {
            add(op->src[i]);
        }
    }
    return question;
}
