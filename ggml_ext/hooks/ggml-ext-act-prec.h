// Activations with more precision than 8 bits, using the kernels for 8 bits. ggml_prec_set_src(node, GGML_PREC_F16, 1) marks a
// product of a quantized matrix W with columns x. It is computed as a product with twice the columns:
//
//     y = dequantize(quantize(x)),  r = 128 (x - y),      W x = W y + W r / 128.
//
// The backend quantizes y and r to 8 bits. y does not change, since 8 bits represent it. x - y is at most half a step of x's block,
// so the steps of r are about 254 times finer (docs/reference/act-prec.md derives the bound). The factor 128 is exact; without it,
// the scale of r would be a subnormal half where that of x is below 254*2^-14.
#pragma once

#include <stdbool.h>

#include "ggml.h"

#define GGML_EXT_RESIDUAL_SCALE 128.0f

// Whether node, a MUL_MAT or MUL_MAT_ID, quantizes its activations.
static inline bool ggml_ext_can_split_activations(const struct ggml_tensor * node) {
    return ggml_is_quantized(node->src[0]->type) && node->src[1]->type == GGML_TYPE_F32;
}

static inline bool ggml_ext_splits_activations(const struct ggml_tensor * node) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && node->op_params[3] == GGML_PREC_F16 &&
           ggml_ext_can_split_activations(node);
}

// A node with twice the columns, its activations and, for MUL_MAT_ID, the experts of twice the tokens.
struct ggml_ext_doubled {
    struct ggml_tensor dst, src1, ids;
};
