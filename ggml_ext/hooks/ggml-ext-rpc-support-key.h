// The cache key of ggml-ext-rpc.h: everything that a device's answer depends on. A request during a run waits for all work of the
// server, so the key excludes the number of tokens, unless a tensor exceeds the buffer size that Vulkan guarantees
// (maxStorageBufferRange).
#pragma once

#include "ggml-ext-supports.h"

#include <vector>

static inline std::vector<int64_t> ggml_ext_rpc_support_key(uint32_t device, const ggml_tensor * op) {
    std::vector<int64_t> key = { device, op->op };
    key.insert(key.end(), op->op_params, op->op_params + 4);
    const auto add_tensor = [&](const ggml_tensor * t) {
        const int64_t n_bytes = (int64_t) ggml_nbytes(t);
        key.insert(key.end(), { t->type, t->ne[0], (int64_t) t->nb[0], n_bytes < 1 << 27 ? 0 : n_bytes });
        if (ggml_ext_is_ext_type(t->type)) {
            key.insert(key.end(), t->ne + 1, t->ne + GGML_MAX_DIMS);
        }
    };
    add_tensor(op);
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i]) {
            add_tensor(op->src[i]);
        }
    }
    return key;
}
