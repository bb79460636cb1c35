// Encoder of DITTO3. A codebook per block is clustered optimally, one per tensor by the paper's loop, which is near the optimum for so
// many weights (kmeans.h); compiled with -ffp-contract=off.
#include "kmeans.h"
#include "levels.h"

#include "../types/ditto3.h"

#include <stdlib.h>

enum {
    K       = EXT_K,
    N_STEPS = 10000, // for a tensor; it converges after some hundred
};

struct sample {
    float x, weight;
};

// Compute the centroids of a block in ascending order.
static void cluster_block(const struct sample s[QK_K], double c[K]) {
    double x[QK_K], sum_w[QK_K + 1] = {0}, sum_wx[QK_K + 1] = {0};
    for (int j = 0; j < QK_K; ++j) {
        x[j] = (double) s[j].x;
        sum_w [j + 1] = sum_w [j] + (double) s[j].weight;
        sum_wx[j + 1] = sum_wx[j] + (double) s[j].weight*x[j];
    }
    ext_cluster_optimal(&(struct ext_samples) {QK_K, x, sum_w, sum_wx}, c);
}

// Sort by value. Equal weights keep their order, on which the sums of their importances depend.
static void sort_samples(struct sample s[QK_K]) {
    for (int i = 1; i < QK_K; ++i) {
        const struct sample t = s[i];
        int j = i;
        for (; j > 0 && s[j - 1].x > t.x; --j) {
            s[j] = s[j - 1];
        }
        s[j] = t;
    }
}

static void store_codebook(const double c[K], block_ditto3 * dst) {
    double top = 0;
    for (int k = 0; k < K; ++k) {
        top = fmax(top, fabs(c[k]));
    }
    dst->d = ggml_fp32_to_fp16((float) fmin(top/63, (double) EXT_HALF_MAX));
    const double d = (double) ggml_fp16_to_fp32(dst->d);
    for (int k = 0; k < K; ++k) {
        const double v = d > 0 ? fmax(-63, fmin(nearbyint(c[k]/d), 63)) : 0;
        dst->codebook[k] = (uint8_t) ((int) v + DITTO3_OFFSET);
    }
}

static void store_indices(const float * x, block_ditto3 * dst) {
    const double d = (double) ggml_fp16_to_fp32(dst->d);
    uint8_t code[QK_K];
    for (int j = 0; j < QK_K; ++j) {
        int best = 0;
        for (int k = 1; k < K; ++k) { // a weight in the middle goes up
            best += (double) x[j] >= 0.5*d*(dst->codebook[k - 1] + dst->codebook[k] - 2*DITTO3_OFFSET);
        }
        code[j] = (uint8_t) best;
    }
    ggml_ext_pack_bits3(code, QK_K, dst->ql, dst->qh);
}

static void encode_block(const float * x, const float * importance, const float * codebook, block_ditto3 * dst) {
    struct sample s[QK_K];
    bool   finite = true;
    double total  = 0;
    for (int j = 0; j < QK_K; ++j) {
        finite &= fabsf(x[j]) <= FLT_MAX;
        s[j] = (struct sample) {x[j], importance ? (float) ext_importance(importance[j]) : 0};
        total += (double) s[j].weight;
    }
    memset(dst, 0, sizeof(*dst));
    if (!finite) {
        dst->d = EXT_HALF_NAN; // row validation refuses it
        return;
    }
    double c[K];
    if (codebook) {
        for (int k = 0; k < K; ++k) {
            c[k] = (double) codebook[k];
        }
    } else {
        for (int j = 0; j < QK_K && !(total > 0); ++j) {
            s[j].weight = 1; // without importance all weights count equally
        }
        sort_samples(s);
        cluster_block(s, c);
    }
    store_codebook(c, dst);
    store_indices(x, dst);
}

// --- under a Hessian -------------------------------------------------------------------------------------------------

static void set_levels(const block_ditto3 * x, float level[K]) {
    for (int k = 0; k < K; ++k) {
        level[k] = ggml_fp16_to_fp32(x->d)*((float) x->codebook[k] - DITTO3_OFFSET);
    }
}

static inline __attribute__((always_inline)) void encode_block_under_hessian(struct ext_levels_block * in, const float * codebook, block_ditto3 * dst,
                                                                             struct ext_levels_best * best) {
    metric_find_optimum(in->metric, in->first, QK_K, in->x, in->goal, in->optimum);
    const float * B = metric_schur(in->metric, in->first);
    double  c[K];
    float   level[K], B_opt[QK_K];
    uint8_t code[QK_K];
    if (codebook) {
        for (int k = 0; k < K; ++k) {
            c[k] = (double) codebook[k];
        }
    } else {
        struct sample s[QK_K];
        for (int t = 0; t < QK_K; ++t) {
            s[t] = (struct sample) {in->optimum[t], B[t*QK_K + t]};
        }
        sort_samples(s);
        cluster_block(s, c);
    }
    block_ditto3 x = {0};
    *best = (struct ext_levels_best) {.cost = INFINITY};
    metric_multiply(QK_K, B, in->optimum, B_opt);
    for (int round = 0; round < (codebook ? 1 : EXT_LEVELS_ROUNDS); ++round) {
        store_codebook(c, &x);
        set_levels(&x, level);
        if (round == 0) {
            ext_levels_init(in, level, code);
        }
        const float before = best->cost;
        ext_levels_improve(in, level, code, best);
        if (best->cost < before) {
            *dst = x;
        }
        double a[K][K], b[K];
        ext_levels_normal_equations(in, B_opt, code, a, b);
        ext_solve(K, &a[0][0], b, level, c);
        for (int k = 1; k < K; ++k) {
            if (!(c[k - 1] <= c[k])) {
                return;
            }
        }
    }
}

EXT_CLONES
static void encode_rows_under_hessian(const float * src, block_ditto3 * dst, int64_t n_rows, int64_t row_blocks, const float * codebook,
                                      const struct ggml_ext_metric * metric) {
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        struct ext_levels_best  best = {0};
        block_ditto3 * x = &dst[rows.block];
        memset(x, 0, sizeof(*x));
        if (ext_rows_load(&rows, src, false, in.x, in.goal)) {
            encode_block_under_hessian(&in, codebook, x, &best);
        } else {
            x->d = EXT_HALF_NAN; // row validation refuses it
        }
        uint8_t code_by_position[QK_K];
        float * errors = ext_rows_errors(&rows);
        for (int t = 0; t < QK_K; ++t) {
            code_by_position[ggml_ext_trellis_position(QK_K, t)] = best.code[t];
            errors[t] = in.x[t] - best.level[best.code[t]];
        }
        ggml_ext_pack_bits3(code_by_position, QK_K, x->ql, x->qh);
    }
    ext_rows_end(&rows);
}

void ggml_ext_encode_ditto3(const float * src, block_ditto3 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    if (params->metric) {
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, params->ditto3_codebook, params->metric);
        return;
    }
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        encode_block(src + ib*QK_K, importance ? importance + ib%row_blocks*QK_K : NULL, params->ditto3_codebook, &dst[ib]);
    }
}

// Return the histogram bin of x. Floats that share sign, exponent and the upper ten bits of the mantissa share a bin; bins ascend. F16 and
// BF16 values have a bin each.
static uint32_t find_bin(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (bits >> 31 ? ~bits : bits | UINT32_C(1) << 31) >> 13;
}
static_assert(GGML_EXT_DITTO3_BINS == UINT32_C(1) << (32 - 13), "a bin is the upper 19 bits of a float");

void ggml_ext_ditto3_add_rows(double * sum_w, double * sum_wx, const float * src, int64_t nrows, int64_t n_per_row,
                              const float * imatrix) {
    double total = 0;
    for (int64_t j = 0; j < n_per_row && imatrix; ++j) {
        total += ext_importance(imatrix[j]);
    }
    const bool weighted = total > 0; // as encode_block() does
    for (int64_t ir = 0; ir < nrows; ++ir) {
        for (int64_t j = 0; j < n_per_row; ++j) {
            const float x = src[ir*n_per_row + j];
            if (fabsf(x) <= FLT_MAX) {
                const double w = weighted ? ext_importance(imatrix[j]) : 1;
                sum_w [find_bin(x)] += w;
                sum_wx[find_bin(x)] += w*(double) x;
            }
        }
    }
}

bool ggml_ext_ditto3_codebook(const double * bin_w, const double * bin_wx, float codebook[8]) {
    int n = 0;
    for (int i = 0; i < GGML_EXT_DITTO3_BINS; ++i) {
        n += bin_w[i] > 0;
    }
    double * x = malloc(((size_t) 3*n + 2)*sizeof(double));
    if (n == 0 || x == NULL) {
        free(x);
        return false;
    }
    double * sum_w = x + n, * sum_wx = sum_w + n + 1;
    sum_w[0] = sum_wx[0] = 0;
    for (int i = 0, j = 0; i < GGML_EXT_DITTO3_BINS; ++i) {
        if (bin_w[i] > 0) {
            x[j] = bin_wx[i]/bin_w[i];
            sum_w [j + 1] = sum_w [j] + bin_w [i];
            sum_wx[j + 1] = sum_wx[j] + bin_wx[i];
            ++j;
        }
    }
    double c[K];
    ext_cluster_lloyd(&(struct ext_samples) {n, x, sum_w, sum_wx}, N_STEPS, c);
    for (int k = 0; k < K; ++k) {
        codebook[k] = (float) c[k];
    }
    free(x);
    return true;
}
