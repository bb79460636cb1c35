// Encoder of ITQ3_S. Every float operation has one order (see encode.h), so that the numpy reference gives the same
// bytes; the file is compiled with -ffp-contract=off.
#include "levels.h"

#include "../types/itq3_s.h"

// Starting scales, in units of the block's standard deviation. 0.586 is the best step of a uniform eight-level
// quantizer for a Gaussian; blocks differ in tails, so the neighbourhood is tried and the best kept.
static const float k_start_scales[] = {0.46f, 0.50f, 0.54f, 0.58f, 0.62f, 0.66f, 0.72f};
// Starting centres, in units of d from the middle of the codes. Shifted starts find asymmetric fits: they take the error
// on a Gaussian from 0.0350 to 0.0340 (1 M weights, relative squared error).
static const float k_start_shifts[] = {-0.4f, -0.2f, 0.0f, 0.2f, 0.4f};
enum {
    N_STARTS = sizeof(k_start_scales)/sizeof(k_start_scales[0]),
    N_SHIFTS = sizeof(k_start_shifts)/sizeof(k_start_shifts[0]),
    N_REFITS = 4,
};

// The codes in 0..top nearest to x/d + z; ties go up.
static inline ext_i32 nearest_codes(ext_f32 x, float inv_d, float z, float top) {
    return __builtin_convertvector(ext_clamp(x*inv_d + z, 0.0f, top) + 0.5f, ext_i32);
}

static inline float inverse(float d) {
    return d != 0.0f ? 1.0f/d : 0.0f;
}

// Squared error of the best codes for (d, z).
static float squared_error(const float * x, float d, float z, float top) {
    const float inv_d = inverse(d);
    ext_f32 err[2] = {0};
    for (int i = 0; i < QK_K/4; ++i) {
        const ext_f32 v = ext_load(x + 4*i);
        const ext_f32 e = v - d*(__builtin_convertvector(nearest_codes(v, inv_d, z, top), ext_f32) - z);
        err[i%2] += e*e;
    }
    return ext_sum(err);
}

// Least-squares d and z for the codes of the present ones: minimises sum (x - (a*c + b))^2, d = a, z = -b/a. False when
// the codes are all equal or the fit turns their order around. The sums of codes are integers below 2^24: exact.
static bool refit(const float * x, float sum_x, float * d, float * z) {
    const float inv_d = 1.0f/ *d;
    ext_f32 sum_c[2] = {0}, sum_cc[2] = {0}, sum_xc[2] = {0};
    for (int i = 0; i < QK_K/4; ++i) {
        const ext_f32 v = ext_load(x + 4*i);
        const ext_f32 c = __builtin_convertvector(nearest_codes(v, inv_d, *z, 7.0f), ext_f32);
        sum_c[i%2]  += c;
        sum_cc[i%2] += c*c;
        sum_xc[i%2] += v*c;
    }
    const double n   = QK_K;
    const double sc  = (double) ext_sum(sum_c);
    const double det = n*(double) ext_sum(sum_cc) - sc*sc;
    if (det == 0) {
        return false;
    }
    const double a = (n*(double) ext_sum(sum_xc) - sc*(double) sum_x)/det;
    const double b = ((double) sum_x - a*sc)/n;
    *d = (float) a;
    *z = (float) (-b/a);
    return *d > 0.0f && *d <= EXT_HALF_MAX && fabsf(*z) <= EXT_HALF_MAX;
}

struct best {
    float     err;
    ggml_half d, z;
};

// Scores (d, z) as they will be stored and keeps them if they are the best so far.
static void try_scale(const float * x, float d, float z, float top, struct best * best) {
    const ggml_half hd  = ggml_fp32_to_fp16(d);
    const ggml_half hz  = ggml_fp32_to_fp16(z);
    const float     err = squared_error(x, ggml_fp16_to_fp32(hd), ggml_fp16_to_fp32(hz), top);
    if (err < best->err) {
        *best = (struct best) {err, hd, hz};
    }
}

static void refine(const float * x, float sum_x, float d, float z, struct best * best) {
    for (int r = 0; r < N_REFITS; ++r) {
        if (!refit(x, sum_x, &d, &z)) {
            return;
        }
    }
    try_scale(x, d, z, 7.0f, best);
}

static void encode_eight_levels(const float * x, const struct ext_block_stats * s, struct best * best) {
    for (int i = 0; i < N_STARTS; ++i) {
        const float d = k_start_scales[i]*s->sigma;
        if (d > 0.0f && d <= EXT_HALF_MAX) {
            for (int k = 0; k < N_SHIFTS; ++k) {
                refine(x, s->sum, d, 3.5f + k_start_shifts[k] - s->mean/d, best);
            }
        }
    }
    // Blocks far from a bell, such as one spike or two values alone (the rotation of an impulse), want the whole range instead.
    const float d = (s->max - s->min)/7.0f;
    if (d > 0.0f && d <= EXT_HALF_MAX) {
        refine(x, s->sum, d, -s->min/d, best);
        try_scale(x, d, -s->min/d, 7.0f, best);
    }
    // All values alike (the rotation of an impulse in the first place): one step above zero, or below.
    if (d == 0.0f) {
        try_scale(x, fminf(fabsf(s->max), EXT_HALF_MAX), s->max > 0.0f ? 0.0f : 1.0f, 7.0f, best);
    }
}

// The paper's ternary (section "Training"): d = 0.798 sigma, z_p = -round(mean/d), codes clamp(round(x/d) + z_p, -1, 1)
// stored as 0, 1, 2, so that z = z_p + 1. No search.
static void encode_ternary(const float * x, const struct ext_block_stats * s, struct best * best) {
    const ggml_half hd = ggml_fp32_to_fp16(fminf(0.798f*s->sigma, EXT_HALF_MAX));
    const float     d  = ggml_fp16_to_fp32(hd);
    const float     z  = d > 0.0f ? floorf(-s->mean/d + 0.5f) + 1.0f : 1.0f;
    best->err = FLT_MAX; // as printed, even where zeros would be closer
    try_scale(x, d, fmaxf(-EXT_HALF_MAX, fminf(z, EXT_HALF_MAX)), 2.0f, best);
}

// --- under a metric --------------------------------------------------------------------------------------------------

// The levels of d and z as they are stored.
static void set_levels(ggml_half d, ggml_half z, float level[EXT_LEVELS]) {
    for (int k = 0; k < EXT_LEVELS; ++k) {
        level[k] = ggml_fp16_to_fp32(d)*((float) k - ggml_fp16_to_fp32(z));
    }
}

// d and z of least cost under fixed codes. False where codes are all equal or the fit is of no use, as refit().
static bool refit_form(double a[EXT_LEVELS][EXT_LEVELS], double b[EXT_LEVELS], ggml_half * d, ggml_half * z) {
    double s = 0, sc = 0, scc = 0, sx = 0, sxc = 0; // sums of the form, with codes on none, one and both sides; of its pull
    for (int k = 0; k < EXT_LEVELS; ++k) {
        double row = 0, row_c = 0;
        for (int l = 0; l < EXT_LEVELS; ++l) {
            row   += a[k][l];
            row_c += a[k][l]*l;
        }
        s   += row;
        sc  += row_c;
        scc += row_c*k;
        sx  += b[k];
        sxc += b[k]*k;
    }
    const double det = s*scc - sc*sc;
    if (!(det > 0)) {
        return false;
    }
    const double slope = (s*sxc - sc*sx)/det, offset = (sx - sc*slope)/s;
    const float  new_d = (float) slope, new_z = (float) (-offset/slope);
    *d = ggml_fp32_to_fp16(new_d);
    *z = ggml_fp32_to_fp16(new_z);
    return new_d > 0.0f && new_d <= EXT_HALF_MAX && fabsf(new_z) <= EXT_HALF_MAX;
}

static inline __attribute__((always_inline)) void encode_form(struct ext_levels_block * in, uint8_t q[QK_K], struct best * out) {
    metric_aim(in->metric, in->first, QK_K, in->x, in->wish, in->target);
    const struct ext_block_stats s = ext_block_stats(in->target);
    struct best start = {.err = s.energy};
    encode_eight_levels(in->target, &s, &start);
    float pull[QK_K], level[EXT_LEVELS];
    metric_form_times(QK_K, metric_block(in->metric, in->first), in->target, pull);
    struct ext_levels_best best = {.cost = ext_dot(in->target, pull)}; // of d = 0, which stays if nothing beats it
    uint8_t code[QK_K];
    ggml_half d = start.d, z = start.z;
    set_levels(d, z, level);
    ext_levels_start(in, level, code);
    for (int round = 0; round < EXT_LEVELS_ROUNDS; ++round) {
        const float before = best.cost;
        ext_levels_improve(in, level, code, &best);
        if (best.cost < before) {
            *out = (struct best) {best.cost, d, z};
        }
        double a[EXT_LEVELS][EXT_LEVELS], b[EXT_LEVELS];
        ext_levels_normal(in, pull, code, a, b);
        if (!refit_form(a, b, &d, &z)) {
            break;
        }
        set_levels(d, z, level);
    }
    memcpy(q, best.code, sizeof(best.code));
}

// By the squared error, or the paper's ternary.
static void encode_plain(const float x[QK_K], bool ternary, uint8_t q[QK_K], struct best * best) {
    const struct ext_block_stats s = ext_block_stats(x);
    best->err = s.energy; // of d = 0, which stays if nothing beats it
    if (ternary) {
        encode_ternary(x, &s, best);
    } else {
        encode_eight_levels(x, &s, best);
    }
    const float inv_d = inverse(ggml_fp16_to_fp32(best->d));
    for (int i = 0; i < QK_K; i += 4) {
        const ext_i32 c = nearest_codes(ext_load(x + i), inv_d, ggml_fp16_to_fp32(best->z), ternary ? 2.0f : 7.0f);
        for (int l = 0; l < 4; ++l) {
            q[i + l] = (uint8_t) c[l];
        }
    }
}

EXT_CLONES
static void encode_rows_form(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks,
                             const struct ggml_ext_metric * metric) {
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        struct best best = {.d = EXT_HALF_NAN, .z = EXT_HALF_NAN}; // refused by row validation
        uint8_t q[QK_K] = {0}, by_position[QK_K];
        float   level[EXT_LEVELS] = {0};
        if (ext_rows_load(&rows, src, true, in.x, in.wish)) {
            best = (struct best) {0};
            encode_form(&in, q, &best);
            set_levels(best.d, best.z, level);
        }
        float * errors = ext_rows_errors(&rows);
        for (int t = 0; t < QK_K; ++t) {
            by_position[ggml_ext_trellis_position(QK_K, t)] = q[t];
            errors[t] = in.x[t] - level[q[t]];
        }
        ggml_ext_pack_itq3_s(by_position, best.d, best.z, &dst[rows.at]);
    }
    ext_rows_end(&rows);
}

void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    const bool ternary = params->itq3_levels == 3; // as printed: without any importance
    if (params->metric && !ternary) {
        encode_rows_form(src, dst, n_rows, row_blocks, params->metric);
        return;
    }
    if (importance && !ternary) {
        struct ggml_ext_metric * diagonal = metric_of_importance(GGML_TYPE_ITQ3_S, row_blocks*QK_K, QK_K, importance);
        GGML_ASSERT(diagonal != NULL);
        encode_rows_form(src, dst, n_rows, row_blocks, diagonal);
        ggml_ext_metric_free(diagonal);
        return;
    }
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        float   x[QK_K];
        uint8_t q[QK_K] = {0}; // of a refused block
        struct best best = {0};
        if (!ext_load_rotated(src + ib*QK_K, x, QK_K)) {
            best.d = best.z = EXT_HALF_NAN; // refused by row validation
        } else {
            encode_plain(x, ternary, q, &best);
        }
        ggml_ext_pack_itq3_s(q, best.d, best.z, &dst[ib]);
    }
}
