// A marked product (ggml-ext-act-prec.h) as a node of twice the columns, in parts: what backends have in common.
#pragma once

#include "ggml-ext-act-prec.h"
#include "ggml-impl.h"

#include <algorithm>

// A node is computed in parts of some of its columns (of MUL_MAT_ID: of its tokens), which bounds the room for results: 32 MiB,
// or 64 columns of them.
struct ggml_ext_parts {
    int     dim;  // of src1 and of the results
    int64_t n;    // its length
    int64_t size; // of a part; the last one may have less
    explicit ggml_ext_parts(const ggml_tensor * node) : dim(node->op == GGML_OP_MUL_MAT_ID ? 2 : 1), n(node->ne[dim]) {
        const int64_t max_results = 1 << 22, min_columns = 32;
        const int64_t limit = std::max(max_results*n/std::max<int64_t>(ggml_nelements(node), 1), min_columns);
        const int64_t count = std::max<int64_t>((n + limit - 1)/limit, 1); // there are nodes without columns
        size = (n + count - 1)/count;
    }
};

// Gives the tensor the length n in a dimension, and room at *at.
static inline void ggml_ext_place(ggml_tensor * tensor, int dim, int64_t n, char ** at) {
    tensor->ne[dim] = n;
    tensor->nb[0]   = ggml_type_size(tensor->type);
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        tensor->nb[i] = tensor->nb[i - 1]*tensor->ne[i - 1];
    }
    tensor->buffer   = nullptr;
    tensor->view_src = nullptr;
    tensor->extra    = nullptr;
    tensor->data     = *at;
    *at += GGML_PAD(ggml_nbytes(tensor), 64);
}

// The node with two columns for each of n, its tensors from *at on, which moves behind them.
static inline void ggml_ext_make_doubled(const ggml_tensor * node, int64_t n, ggml_ext_doubled * doubled, char ** at) {
    const ggml_ext_parts cut(node);
    doubled->src1 = *node->src[1];
    doubled->dst  = *node;
    ggml_ext_place(&doubled->src1, cut.dim, 2*n, at);
    ggml_ext_place(&doubled->dst, cut.dim, 2*n, at);
    doubled->dst.src[1]       = &doubled->src1;
    doubled->dst.op_params[3] = GGML_PREC_Q8; // what both columns need and no less: for ggml_ext_study_from_float()
    if (node->op == GGML_OP_MUL_MAT_ID) {
        doubled->ids = *node->src[2];
        ggml_ext_place(&doubled->ids, 1, 2*n, at);
        doubled->dst.src[2] = &doubled->ids;
    }
}

// Bytes of ggml_ext_make_doubled() for the largest part, with what aligning the first tensor takes.
static inline size_t ggml_ext_doubled_size(const ggml_tensor * node) {
    ggml_ext_doubled doubled;
    char * at = nullptr;
    ggml_ext_make_doubled(node, ggml_ext_parts(node).size, &doubled, &at);
    return (size_t) at + 64;
}
