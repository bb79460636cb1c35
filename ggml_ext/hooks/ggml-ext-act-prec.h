// Activations more exact than 8 bits, without kernels of their own. A product of a quantized matrix W with columns x, marked by
// ggml_prec_set_src(node, GGML_PREC_F16, 1), is computed as that with twice the columns,
//
//     y = dequantized(quantized(x)),  r = 128 (x - y),      W x = W y + W r / 128,
//
// each of which the backend quantizes to 8 bits as any other. y, being what 8 bits can hold, survives that; x - y is at most half
// a step of x's block, so that its own steps are some 254 times finer (docs/reference/act-prec.md has the bound). The factor, a power of
// two, is exact: without it the scale of r would be no normal half float where that of x is below 254*2^-14.
#pragma once

#include <stdbool.h>

#include "ggml.h"

#define GGML_EXT_RESIDUAL_SCALE 128.0f

// whether node, a MUL_MAT or MUL_MAT_ID, quantizes its activations
static inline bool ggml_ext_can_split_activations(const struct ggml_tensor * node) {
    return ggml_is_quantized(node->src[0]->type) && node->src[1]->type == GGML_TYPE_F32;
}

static inline bool ggml_ext_splits_activations(const struct ggml_tensor * node) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && node->op_params[3] == GGML_PREC_F16 &&
           ggml_ext_can_split_activations(node);
}

// A node of twice the columns, its activations and, of MUL_MAT_ID, the experts of its tokens, which are twice as many there.
struct ggml_ext_doubled {
    struct ggml_tensor dst, src1, ids;
};
