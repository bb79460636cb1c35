// The block structs of all weight types, and the functions that ggml's type traits point to.
#pragma once

#include "ggml-ext-common.h"

#include "types/all.h"

#ifdef __cplusplus
extern "C" {
#endif

#define X(NAME, name)                                                                   \
    GGML_API void dequantize_row_##name(const block_##name * x, float * y, int64_t n);  \
    GGML_API void quantize_row_##name##_ref(const float * x, void * y, int64_t n);
GGML_EXT_WEIGHT_TYPES(X)
#undef X

// Return false and log an error for a type that is not valid in a file: an activation type or a retired one.
bool ggml_ext_may_be_in_file(enum ggml_type type, const char * tensor_name);

#ifdef __cplusplus
}
#endif
