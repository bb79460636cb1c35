// A marked product (ggml-ext-act-prec.h) as nodes with twice the columns, for all backends.
#pragma once

#include "ggml-ext-act-prec.h"
#include "ggml-impl.h"

#include <algorithm>

// Parts of a node's columns (MUL_MAT_ID: tokens) that are computed at once. They bound the results to 32 MiB or 64 columns.
struct ggml_ext_parts {
    int     dim;  // dimension of src1 and of the results
    int64_t n;    // its size
    int64_t size; // size of a part; the last part may be smaller
    explicit ggml_ext_parts(const ggml_tensor * node) : dim(node->op == GGML_OP_MUL_MAT_ID ? 2 : 1), n(node->ne[dim]) {
        const int64_t max_results = 1 << 22, min_columns = 32;
        const int64_t limit = std::max(max_results*n/std::max<int64_t>(ggml_nelements(node), 1), min_columns);
        const int64_t count = std::max<int64_t>((n + limit - 1)/limit, 1); // a node may have no columns
        size = (n + count - 1)/count;
    }
};

// Resize a dimension of the tensor to n and place its data at *data, which moves behind it.
static inline void ggml_ext_place_tensor(ggml_tensor * tensor, int dim, int64_t n, char ** data) {
    tensor->ne[dim] = n;
    tensor->nb[0]   = ggml_type_size(tensor->type);
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        tensor->nb[i] = tensor->nb[i - 1]*tensor->ne[i - 1];
    }
    tensor->buffer   = nullptr;
    tensor->view_src = nullptr;
    tensor->extra    = nullptr;
    tensor->data     = *data;
    *data += GGML_PAD(ggml_nbytes(tensor), 64);
}

// Make a node with two columns for each of n. Its tensors are placed at *data, which moves behind them.
static inline void ggml_ext_make_doubled(const ggml_tensor * node, int64_t n, ggml_ext_doubled * doubled, char ** data) {
    const ggml_ext_parts parts(node);
    doubled->src1 = *node->src[1];
    doubled->dst  = *node;
    ggml_ext_place_tensor(&doubled->src1, parts.dim, 2*n, data);
    ggml_ext_place_tensor(&doubled->dst, parts.dim, 2*n, data);
    doubled->dst.src[1]       = &doubled->src1;
    doubled->dst.op_params[3] = GGML_PREC_Q8; // both columns need exactly 8 bits (ggml_ext_study_from_float)
    if (node->op == GGML_OP_MUL_MAT_ID) {
        doubled->ids = *node->src[2];
        ggml_ext_place_tensor(&doubled->ids, 1, 2*n, data);
        doubled->dst.src[2] = &doubled->ids;
    }
}

// Bytes of ggml_ext_make_doubled() for the largest part, including the alignment of the first tensor.
static inline size_t ggml_ext_doubled_size(const ggml_tensor * node) {
    ggml_ext_doubled doubled;
    char * end = nullptr;
    ggml_ext_make_doubled(node, ggml_ext_parts(node).size, &doubled, &end);
    return (size_t) end + 64;
}
