// What the backend's host code asks about our types.
#pragma once

#include "ggml-ext-traits.h"

namespace ggml_ext {

// Copies that dequantise: from any of our types to F32, F16 or BF16 of the same shape; rows of both are contiguous.
static inline bool can_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    return is_weight_type(src->type) && (dst->type == GGML_TYPE_F32 || dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_BF16) &&
           ggml_are_same_shape(src, dst) && src->nb[0] == ggml_type_size(src->type) && dst->nb[0] == ggml_type_size(dst->type);
}

} // namespace ggml_ext
