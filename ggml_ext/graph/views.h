// Views: tensors that present the data of another one in another shape or order, or a part of it.
#pragma once

#include "ggml.h"

namespace ggml_ext {

inline bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// Follow views to the tensor that has the data. Null stays null.
inline const ggml_tensor * skip_views(const ggml_tensor * t) {
    while (t && is_view(t)) {
        t = t->src[0];
    }
    return t;
}

} // namespace ggml_ext
