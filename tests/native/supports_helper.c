// ggml-ext-supports.h for ctypes, compiled without a ggml library.
#include "ggml-ext-supports.h"

#ifdef __cplusplus
extern "C" {
#endif

bool is_ext_type(int type) { return ggml_ext_is_ext_type((enum ggml_type) type); }

// Check an F32 operation whose result (position -1) or source `position` has the type; the sources before it are set.
bool op_needs_kernels(int op, int position, int type) {
    struct ggml_tensor src[GGML_MAX_SRC] = {}, result = {};
    result.op   = (enum ggml_op) op;
    result.type = position < 0 ? (enum ggml_type) type : GGML_TYPE_F32;
    for (int i = 0; i <= position; i++) {
        src[i].type   = i == position ? (enum ggml_type) type : GGML_TYPE_F32;
        result.src[i] = &src[i];
    }
    return ggml_ext_op_needs_kernels(&result);
}

int op_count(void) { return GGML_OP_COUNT; }
int max_src(void) { return GGML_MAX_SRC; }
bool only_names_memory(int op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

#ifdef __cplusplus
}
#endif
