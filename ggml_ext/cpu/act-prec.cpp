// Products with activations of more than 8 bits (ggml-ext-act-prec.h) on the CPU. A node of twice the columns runs on whatever kernels
// ggml-cpu chooses: dot products, tiles, repacked weights, AMX, tinyBLAS.
#include "ggml-ext-cpu.h"
#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "ggml-quants.h"
#include "act-prec-doubled.h"

#include <algorithm>

ggml_tensor * ggml_ext_planned_node(ggml_tensor * node, ggml_ext_doubled * doubled, size_t * work_size) {
    if (!ggml_ext_splits_activations(node)) {
        return node;
    }
    char * buffer = nullptr;
    ggml_ext_make_doubled(node, ggml_ext_parts(node).size, doubled, &buffer);
    *work_size = ggml_ext_doubled_size(node);
    return &doubled->dst;
}

// Rotate n <= 256 quantized values back, which are in blocks of block_size and in the order of ggml_ext_group_offset().
static void read_rotated(int block_size, float d, const int8_t * qs, float * y, int64_t n) {
    const int64_t L = block_size/8; // values of a block in a group
    alignas(32) float v[QK_K];
    for (int64_t j = 0; j < n; ++j) {
        v[j] = d*qs[ggml_ext_group_offset((int) (j%block_size/L)) + j/block_size*L + j%L];
    }
    ggml_ext_rotate_activations_back(v, n, block_size);
    memcpy(y, v, n*sizeof(v[0]));
}

// Round n <= 256 values of a row to what the activation type's 8 bits hold. Q8_1 has the values of Q8_0.
static void round_to_8_bits(ggml_type type, const float * x, float * y, int64_t n) {
    union {
        block_q8_0    q8_0[QK_K/QK8_0];
        block_q8_K    q8_K;
        block_q8_kr64 q8_kr64;
        block_q8_kr32 q8_kr32;
    } block;
    if (type == GGML_TYPE_Q8_1) {
        type = GGML_TYPE_Q8_0;
    }
    ggml_get_type_traits_cpu(type)->from_float(x, &block, n);
    switch ((int) type) {
        case GGML_TYPE_Q8_0: dequantize_row_q8_0(block.q8_0, y, n); break;
        case GGML_TYPE_Q8_K: dequantize_row_q8_K(&block.q8_K, y, n); break;
        case GGML_TYPE_Q8_KR:   read_rotated(QK_K, block.q8_K.d,       block.q8_K.qs,    y, n); break;
        case GGML_TYPE_Q8_KR64: read_rotated(64,   block.q8_kr64.d[0], block.q8_kr64.qs, y, n); break;
        case GGML_TYPE_Q8_KR32: read_rotated(32,   block.q8_kr32.d[0], block.q8_kr32.qs, y, n); break;
        default: GGML_ABORT("%s: activations of no known type", ggml_type_name(type));
    }
}

static float * row(const ggml_tensor * tensor, const int64_t (&i)[4]) {
    return (float *) ((char *) tensor->data + i[1]*tensor->nb[1] + i[2]*tensor->nb[2] + i[3]*tensor->nb[3]);
}

// Call f(x, y, r) for each row x of `original` from index `first` of dimension `dim` on, with its two rows of `doubled`.
template <class F> static void each_row_pair(const ggml_tensor * original, const ggml_tensor * doubled, int dim, int64_t first, F f) {
    const int64_t n[4] = {1, doubled->ne[1], doubled->ne[2], doubled->ne[3]};
    int64_t i[4] = {0};
    for (i[3] = 0; i[3] < n[3]; ++i[3]) {
        for (i[2] = 0; i[2] < n[2]; ++i[2]) {
            for (i[1] = 0; i[1] < n[1]; ++i[1]) {
                if (i[dim] % 2 == 0) {
                    int64_t original_index[4] = {0, i[1], i[2], i[3]}, residual_index[4] = {0, i[1], i[2], i[3]};
                    original_index[dim] = first + i[dim]/2;
                    residual_index[dim] += 1;
                    f(row(original, original_index), row(doubled, i), row(doubled, residual_index));
                }
            }
        }
    }
}

static void split_activations(const ggml_compute_params * params, const ggml_tensor * node, ggml_ext_doubled * doubled, int dim,
                              int64_t first) {
    const ggml_type type     = ggml_get_type_traits_cpu(node->src[0]->type)->vec_dot_type;
    const int64_t   n        = node->src[1]->ne[0];
    const int64_t   n_blocks = (n + QK_K - 1)/QK_K;
    GGML_ASSERT(node->src[1]->nb[0] == sizeof(float));
    int64_t turn = 0; // threads share the blocks of all rows equally
    each_row_pair(node->src[1], &doubled->src1, dim, first, [&](const float * x, float * y, float * r) {
        for (int64_t ib = 0; ib < n_blocks; ++ib, ++turn) {
            if (turn % params->nth == params->ith) {
                const int64_t j = ib*QK_K, end = std::min(n, j + QK_K);
                round_to_8_bits(type, x + j, y + j, end - j);
                for (int64_t k = j; k < end; ++k) {
                    r[k] = (x[k] - y[k])*GGML_EXT_RESIDUAL_SCALE;
                }
            }
        }
    });
    for (int64_t i = params->ith; node->src[2] && i < doubled->ids.ne[1]; i += params->nth) {
        const ggml_tensor * ids = node->src[2];
        for (int64_t k = 0; k < ids->ne[0]; ++k) {
            ((int32_t *) doubled->ids.data)[i*ids->ne[0] + k] =
                *(const int32_t *) ((const char *) ids->data + (first + i/2)*ids->nb[1] + k*ids->nb[0]);
        }
    }
}

bool ggml_ext_compute_doubled(ggml_compute_params * params, ggml_tensor * node,
                              void (*compute)(ggml_compute_params *, ggml_tensor *)) {
    if (!ggml_ext_splits_activations(node)) {
        return false;
    }
    const ggml_ext_parts parts(node);
    for (int64_t first = 0; first < parts.n; first += parts.size) {
        ggml_ext_doubled doubled;
        char * buffer = (char *) GGML_PAD((uintptr_t) params->wdata, 64);
        ggml_ext_make_doubled(node, std::min(parts.size, parts.n - first), &doubled, &buffer);
        const size_t used = buffer - (char *) params->wdata;
        GGML_ASSERT(used <= params->wsize);
        if (first > 0) {
            ggml_barrier(params->threadpool); // the previous part has been added up
        }
        split_activations(params, node, &doubled, parts.dim, first);
        ggml_barrier(params->threadpool);
        ggml_compute_params inner = *params;
        inner.wdata = buffer;
        inner.wsize -= used;
        compute(&inner, &doubled.dst);
        ggml_barrier(params->threadpool);
        const int64_t begin = node->ne[0]*params->ith/params->nth, end = node->ne[0]*(params->ith + 1)/params->nth;
        each_row_pair(node, &doubled.dst, parts.dim, first, [&](float * sum, const float * y, const float * r) {
            for (int64_t k = begin; k < end; ++k) {
                sum[k] = y[k] + r[k]*(1/GGML_EXT_RESIDUAL_SCALE);
            }
        });
    }
    return true;
}
