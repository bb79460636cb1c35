// Encoder of DITTO5: of several scales the one of least squared error, and refits of it. Every float operation has one order (see
// encode.h), so that the numpy reference gives the same bytes; compiled with -ffp-contract=off.
#define EXT_LEVELS 32
#include "levels.h"

#include "../types/ditto5.h"

// Starting scales, in units of the block's root mean square: a block's best one depends on its largest values, which the last
// entries are for. Relative squared error of Gaussian blocks: 0.00217 with 0.045 alone, 0.00212 with five, 0.00211 with these,
// 0.00210 with fifty.
static const float k_start_scales[] = {0.037f, 0.0395f, 0.042f, 0.0445f, 0.047f, 0.0495f, 0.052f, 0.0545f};
enum {
    N_STARTS = sizeof(k_start_scales)/sizeof(k_start_scales[0]),
    N_REFITS = 4,
    N_STEPS  = 128, // of half a unit, which the middles between entries are multiples of
    LANES    = 8,
};

// Entries of the codebook in ascending order, and of the upper half the one nearest to a magnitude by half units, the larger of
// equals.
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

// The entry nearest to x/d, 1/d = inv_d.
static inline int nearest_entry(const struct codebook * c, float x, float inv_d) {
    const float steps = 2.0f*(fabsf(x)*inv_d);
    const int   k     = c->nearest[steps < (float) (N_STEPS - 1) ? (int) steps : N_STEPS - 1];
    return x < 0.0f ? EXT_LEVELS - 1 - k : k;
}

static inline float inverse(float d) {
    return d > 0.0f ? 1.0f/d : 0.0f;
}

// As a block stores it.
static inline float as_scale(float d) {
    return ggml_fp16_to_fp32(ggml_fp32_to_fp16(fminf(d, EXT_HALF_MAX)));
}

struct best {
    float gain; // how far the scale lowers the squared error
    float d;    // as it is stored
};

// Keeps the best scale for the entries that d chooses, as it is stored, if it is the best so far.
static void try_scale(const struct codebook * c, const float * x, float d, struct best * best) {
    const float inv_d = inverse(d);
    ext_f32 xv[2] = {0}, vv[2] = {0};
    for (int i = 0; i < QK_K; ++i) {
        const float v = c->value[nearest_entry(c, x[i], inv_d)];
        xv[i%LANES/4][i%4] += x[i]*v;
        vv[i%LANES/4][i%4] += v*v;
    }
    const float sum_xv = ext_sum(xv), sum_vv = ext_sum(vv);
    const float s = as_scale(sum_xv/sum_vv), gain = s*(2.0f*sum_xv - s*sum_vv);
    if (gain > best->gain) {
        *best = (struct best) {gain, s};
    }
}

// The best scale of a block, as it is stored; 0 where nothing is better.
static float fit_scale(const struct codebook * c, const float * x) {
    ext_f32 energy[2] = {0};
    float   top = 0;
    for (int i = 0; i < QK_K; ++i) {
        energy[i%LANES/4][i%4] += x[i]*x[i];
        top = fmaxf(top, fabsf(x[i]));
    }
    const float rms  = sqrtf(ext_sum(energy)*(1.0f/QK_K));
    struct best best = {0, 0};
    for (int i = 0; i < N_STARTS; ++i) {
        try_scale(c, x, k_start_scales[i]*rms, &best);
    }
    try_scale(c, x, top/c->value[EXT_LEVELS - 1], &best); // blocks far from a bell
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

// The scale of least cost under fixed codes, as it is stored.
static inline __attribute__((always_inline)) float refit_form(const struct ext_levels_block * in, const struct codebook * c,
                                                              const float pull[QK_K], const uint8_t code[QK_K]) {
    float v[QK_K], y[QK_K];
    for (int i = 0; i < QK_K; ++i) {
        v[i] = c->value[code[i]];
    }
    metric_form_times(QK_K, metric_block(in->metric, in->first), v, y);
    return as_scale(ext_dot(v, pull)/ext_dot(v, y));
}

static inline __attribute__((always_inline)) float encode_form(struct ext_levels_block * in, const struct codebook * c, uint8_t q[QK_K]) {
    metric_aim(in->metric, in->first, QK_K, in->x, in->wish, in->target);
    float   pull[QK_K], level[EXT_LEVELS], d = fit_scale(c, in->target), best_d = 0;
    uint8_t code[QK_K];
    metric_form_times(QK_K, metric_block(in->metric, in->first), in->target, pull);
    struct ext_levels_best best = {.cost = ext_dot(in->target, pull)}; // of d = 0, which stays if nothing beats it
    set_levels(c, d, level);
    ext_levels_start(in, level, code);
    for (int round = 0; round < EXT_LEVELS_ROUNDS && d > 0; ++round) {
        const float before = best.cost;
        set_levels(c, d, level);
        ext_levels_improve(in, level, code, &best);
        if (best.cost < before) {
            best_d = d;
        }
        d = refit_form(in, c, pull, code);
    }
    memcpy(q, best.code, sizeof(best.code));
    return best_d;
}

EXT_CLONES
static void encode_rows_form(const float * src, block_ditto5 * dst, int64_t n_rows, int64_t row_blocks, const struct codebook * c,
                             const struct ggml_ext_metric * metric) {
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        uint8_t q[QK_K] = {0}, by_position[QK_K];
        float   level[EXT_LEVELS] = {0};
        const bool  finite = ext_rows_load(&rows, src, GGML_EXT_DITTO5_ROTATED, in.x, in.wish);
        const float d      = finite ? encode_form(&in, c, q) : 0;
        set_levels(c, d, level);
        float * errors = ext_rows_errors(&rows);
        for (int t = 0; t < QK_K; ++t) {
            by_position[ggml_ext_trellis_position(QK_K, t)] = q[t];
            errors[t] = in.x[t] - level[q[t]];
        }
        ggml_ext_pack_ditto5(by_position, finite ? ggml_fp32_to_fp16(d) : EXT_HALF_NAN, &dst[rows.at]); // NaN: refused by row validation
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
        encode_rows_form(src, dst, n_rows, row_blocks, &c, params->metric);
        return;
    }
    if (importance) {
        struct ggml_ext_metric * diagonal = metric_of_importance(GGML_TYPE_DITTO5, row_blocks*QK_K, QK_K, importance);
        GGML_ASSERT(diagonal != NULL);
        encode_rows_form(src, dst, n_rows, row_blocks, &c, diagonal);
        ggml_ext_metric_free(diagonal);
        return;
    }
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        encode_block(src + ib*QK_K, &c, &dst[ib]);
    }
}
