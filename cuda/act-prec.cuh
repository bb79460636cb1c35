// Products with --act-prec f16 (ggml-ext-act-prec.h) in CUDA: a node with twice the columns, computed by upstream's MMVQ or MMQ.
#pragma once

#include "act-prec-doubled.h"
#include "split.cuh"
#include "ggml-cuda/mmq.cuh" // ggml-cuda.cu includes mmvq.cuh, which has no include guard

namespace ggml_ext {

// Groups of the quantizer that node's activations go through. cuBLAS has none: it takes halves, for which any groups do.
static split_groups get_split_groups(const ggml_tensor * node, int cc) {
    const ggml_type type  = node->src[0]->type;
    const bool      is_id = node->op == GGML_OP_MUL_MAT_ID;
    const int64_t   n     = node->src[1]->ne[is_id ? 2 : 1];
    if (is_id ? n <= get_mmvq_mmid_max_batch(type, cc) : ggml_cuda_should_use_mmvq(type, cc, n)) {
        return is_weight_type(type) ? SPLIT_THREADS_BF16 : SPLIT_32_HALF;
    }
    if (!ggml_cuda_should_use_mmq(type, cc, n, is_id ? node->src[0]->ne[2] : 0)) {
        return SPLIT_32_FLOAT;
    }
    switch (mmq_get_q8_1_ds_layout(type)) {
        case MMQ_Q8_1_DS_LAYOUT_D4:   return SPLIT_32_FLOAT;
        case MMQ_Q8_1_DS_LAYOUT_DS4:  return SPLIT_32_HALF;
        case MMQ_Q8_1_DS_LAYOUT_D2S6: return SPLIT_64_HALF;
    }
    GGML_ABORT("%s: no layout of activations", ggml_type_name(type));
}

static pair_strides get_pair_strides(const ggml_tensor * doubled, int dim) {
    pair_strides strides = {{0, 0, 0, 0}, (int64_t) (doubled->nb[dim]/sizeof(float))};
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        strides.s[i] = doubled->nb[i]/sizeof(float)*(i == dim ? 2 : 1);
    }
    return strides;
}

// Compute a marked node by calling `compute` on nodes with twice the columns. Returns false if node is not marked.
template <class Context> static bool compute_doubled(Context & ctx, ggml_tensor * node, bool (*compute)(Context &, ggml_tensor *)) {
    if (!ggml_ext_splits_activations(node)) {
        return false;
    }
    const ggml_tensor * x = node->src[1], * ids = node->src[2];
    GGML_ASSERT(x->nb[0] == sizeof(float) && node->nb[0] == sizeof(float));
    const int cc = ggml_cuda_info().devices[ctx.device].cc;
    const ggml_ext_parts parts(node);
    ggml_cuda_pool_alloc<char> scratch(ctx.pool(), ggml_ext_doubled_size(node));
    for (int64_t first = 0; first < parts.n; first += parts.size) {
        const int64_t n = std::min(parts.size, parts.n - first);
        ggml_ext_doubled doubled;
        char * data = (char *) GGML_PAD((uintptr_t) scratch.get(), 64);
        ggml_ext_make_doubled(node, n, &doubled, &data);

        int64_t ne[2][GGML_MAX_DIMS]; // the part's src1 and results
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            ne[0][i] = i == parts.dim ? n : x->ne[i];
            ne[1][i] = i == parts.dim ? n : node->ne[i];
        }
        const auto stride = [](const ggml_tensor * tensor, int i) { return (int64_t) (tensor->nb[i]/sizeof(float)); };
        split_activations_cuda((const float *) x->data + first*stride(x, parts.dim), (float *) doubled.src1.data, node->src[0]->type,
                               get_split_groups(&doubled.dst, cc), x->ne[0], stride(x, 1), stride(x, 2), stride(x, 3),
                               get_pair_strides(&doubled.src1, parts.dim), ne[0][1], ne[0][2], ne[0][3], ctx.stream());
        if (node->op == GGML_OP_MUL_MAT_ID) {
            const int64_t stride_ids = ids->nb[1]/sizeof(int32_t);
            double_ids_cuda((const int32_t *) ids->data + first*stride_ids, (int32_t *) doubled.ids.data, ids->ne[0], stride_ids, n,
                            ctx.stream());
        }
        compute(ctx, &doubled.dst);
        add_residuals_cuda((const float *) doubled.dst.data, (float *) node->data + first*stride(node, parts.dim), node->ne[0],
                           get_pair_strides(&doubled.dst, parts.dim), stride(node, 1), stride(node, 2), stride(node, 3), ne[1][1], ne[1][2],
                           ne[1][3], ctx.stream());
    }
    return true;
}

} // namespace ggml_ext
