// Queries of the CUDA backend's host code about ggml-ext types.
#pragma once

#include "ggml-ext-traits.h"

namespace ggml_ext {

// Whether dequantize.cuh copies src to dst: a ggml-ext type to F32, F16 or BF16, equal shapes, contiguous rows.
static inline bool can_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    return is_weight_type(src->type) && (dst->type == GGML_TYPE_F32 || dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_BF16) &&
           ggml_are_same_shape(src, dst) && src->nb[0] == ggml_type_size(src->type) && dst->nb[0] == ggml_type_size(dst->type);
}

} // namespace ggml_ext
