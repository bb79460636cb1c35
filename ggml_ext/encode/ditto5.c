// Encoder of DITTO5: try several scales, keep the one of least squared error, refit it. Every float operation has one order (encode.h), so
// that the numpy reference gives the same bytes; compiled with -ffp-contract=off.
#define EXT_LEVELS 32
#include "levels.h"

#include "../types/ditto5.h"

// Start scales in units of the block's root mean square. The best one depends on the largest values of the block.
static const float k_start_scales[] = {0.037f, 0.0395f, 0.042f, 0.0445f, 0.047f, 0.0495f, 0.052f, 0.0545f};
enum {
    N_STARTS = sizeof(k_start_scales)/sizeof(k_start_scales[0]),
    N_REFITS = 4,
    N_STEPS  = 128, // half units; the midpoints between entries are multiples of half a unit
    LANES    = 8,
};

// The codebook in ascending order, and the index of the upper half's entry nearest to a magnitude in half units, of two the larger.
struct codebook {
    float   value[EXT_LEVELS];
    uint8_t nearest[N_STEPS];
};

static struct codebook make_codebook(void) {
    struct codebook c;
    for (int k = 0; k < EXT_LEVELS/2; ++k) {
        const float v = (float) ggml_ext_ditto5_codebook[k] - DITTO5_OFFSET;
        c.value[EXT_LEVELS/2 + k]     = v;
        c.value[EXT_LEVELS/2 - 1 - k] = -v;
    }
    for (int i = 0, k = EXT_LEVELS/2; i < N_STEPS; ++i) {
        while (k < EXT_LEVELS - 1 && (float) i >= c.value[k] + c.value[k + 1]) {
            ++k;
        }
        c.nearest[i] = (uint8_t) k;
    }
    return c;
}

static inline int nearest_entry(const struct codebook * c, float x, float inv_d) {
    const float steps = 2.0f*(fabsf(x)*inv_d);
    const int   k     = c->nearest[steps < (float) (N_STEPS - 1) ? (int) steps : N_STEPS - 1];
    return x < 0.0f ? EXT_LEVELS - 1 - k : k;
}

static inline float inverse(float d) {
    return d > 0.0f ? 1.0f/d : 0.0f;
}

// Round to what a block stores.
static inline float round_scale(float d) {
    return ggml_fp16_to_fp32(ggml_fp32_to_fp16(fminf(d, EXT_HALF_MAX)));
}

struct best {
    float gain; // reduction of the squared error
    float d;    // as stored
};

// Fit a scale to the codes that d gives, and keep it if it is the best so far.
static void try_scale(const struct codebook * c, const float * x, float d, struct best * best) {
    const float inv_d = inverse(d);
    ext_f32 xv[2] = {0}, vv[2] = {0};
    for (int i = 0; i < QK_K; ++i) {
        const float v = c->value[nearest_entry(c, x[i], inv_d)];
        xv[i%LANES/4][i%4] += x[i]*v;
        vv[i%LANES/4][i%4] += v*v;
    }
    const float sum_xv = ext_sum(xv), sum_vv = ext_sum(vv);
    const float s = round_scale(sum_xv/sum_vv), gain = s*(2.0f*sum_xv - s*sum_vv);
    if (gain > best->gain) {
        *best = (struct best) {gain, s};
    }
}

// Return the best scale of a block, as stored; 0 if none is better.
static float fit_scale(const struct codebook * c, const float * x) {
    ext_f32 energy[2] = {0};
    float   x_max = 0;
    for (int i = 0; i < QK_K; ++i) {
        energy[i%LANES/4][i%4] += x[i]*x[i];
        x_max = fmaxf(x_max, fabsf(x[i]));
    }
    const float rms  = sqrtf(ext_sum(energy)*(1.0f/QK_K));
    struct best best = {0, 0};
    for (int i = 0; i < N_STARTS; ++i) {
        try_scale(c, x, k_start_scales[i]*rms, &best);
    }
    try_scale(c, x, x_max/c->value[EXT_LEVELS - 1], &best); // for blocks that are far from Gaussian
    for (int i = 0; i < N_REFITS; ++i) {
        const float before = best.d;
        try_scale(c, x, before, &best);
        if (best.d == before) {
            break;
        }
    }
    return best.d;
}

static void set_levels(const struct codebook * c, float d, float level[EXT_LEVELS]) {
    for (int k = 0; k < EXT_LEVELS; ++k) {
        level[k] = d*c->value[k];
    }
}

// Return the scale of least cost under fixed codes, as stored.
static inline __attribute__((always_inline)) float fit_scale_under_hessian(const struct ext_levels_block * in, const struct codebook * c,
                                                                           const float B_opt[QK_K], const uint8_t code[QK_K]) {
    float v[QK_K], y[QK_K];
    for (int i = 0; i < QK_K; ++i) {
        v[i] = c->value[code[i]];
    }
    metric_multiply(QK_K, metric_schur(in->metric, in->first), v, y);
    return round_scale(ext_dot(v, B_opt)/ext_dot(v, y));
}

static inline __attribute__((always_inline)) float encode_block_under_hessian(struct ext_levels_block * in, const struct codebook * c, uint8_t q[QK_K]) {
    metric_find_optimum(in->metric, in->first, QK_K, in->x, in->goal, in->optimum);
    float   B_opt[QK_K], level[EXT_LEVELS], d = fit_scale(c, in->optimum), best_d = 0;
    uint8_t code[QK_K];
    metric_multiply(QK_K, metric_schur(in->metric, in->first), in->optimum, B_opt);
    struct ext_levels_best best = {.cost = ext_dot(in->optimum, B_opt)}; // of d = 0
    set_levels(c, d, level);
    ext_levels_init(in, level, code);
    for (int round = 0; round < EXT_LEVELS_ROUNDS && d > 0; ++round) {
        const float before = best.cost;
        set_levels(c, d, level);
        ext_levels_improve(in, level, code, &best);
        if (best.cost < before) {
            best_d = d;
        }
        d = fit_scale_under_hessian(in, c, B_opt, code);
    }
    memcpy(q, best.code, sizeof(best.code));
    return best_d;
}

EXT_CLONES
static void encode_rows_under_hessian(const float * src, block_ditto5 * dst, int64_t n_rows, int64_t row_blocks, const struct codebook * c,
                                      const struct ggml_ext_metric * metric) {
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        uint8_t q[QK_K] = {0}, level_by_position[QK_K];
        float   level[EXT_LEVELS] = {0};
        const bool  finite = ext_rows_load(&rows, src, GGML_EXT_DITTO5_ROTATED, in.x, in.goal);
        const float d      = finite ? encode_block_under_hessian(&in, c, q) : 0;
        set_levels(c, d, level);
        float * errors = ext_rows_errors(&rows);
        for (int t = 0; t < QK_K; ++t) {
            level_by_position[ggml_ext_trellis_position(QK_K, t)] = q[t];
            errors[t] = in.x[t] - level[q[t]];
        }
        ggml_ext_pack_ditto5(level_by_position, finite ? ggml_fp32_to_fp16(d) : EXT_HALF_NAN, &dst[rows.block]); // row validation refuses NaN
    }
    ext_rows_end(&rows);
}

static void encode_block(const float * src, const struct codebook * c, block_ditto5 * dst) {
    float   x[QK_K];
    uint8_t q[QK_K] = {0}; // of a refused block
    if (!ext_load_rotated(src, x, QK_K)) {
        ggml_ext_pack_ditto5(q, EXT_HALF_NAN, dst);
        return;
    }
    const float d = fit_scale(c, x), inv_d = inverse(d);
    for (int i = 0; i < QK_K && d > 0; ++i) {
        q[i] = (uint8_t) nearest_entry(c, x[i], inv_d);
    }
    ggml_ext_pack_ditto5(q, ggml_fp32_to_fp16(d), dst);
}

void ggml_ext_encode_ditto5(const float * src, block_ditto5 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    const struct codebook c = make_codebook();
    if (params->metric) {
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, &c, params->metric);
        return;
    }
    if (importance) {
        struct ggml_ext_metric * diagonal = metric_from_importance(GGML_TYPE_DITTO5, row_blocks*QK_K, QK_K, importance);
        GGML_ASSERT(diagonal != NULL);
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, &c, diagonal);
        ggml_ext_metric_free(diagonal);
        return;
    }
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        encode_block(src + ib*QK_K, &c, &dst[ib]);
    }
}
