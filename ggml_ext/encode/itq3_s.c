// Encoder of ITQ3_S. Every float operation has one order (encode.h), so that the numpy reference gives the same bytes; compiled with
// -ffp-contract=off.
#include "levels.h"

#include "../types/itq3_s.h"

// Start scales in units of the block's standard deviation. 0.586 is optimal for a Gaussian with eight uniform levels. Real blocks have
// lighter or heavier tails, so scales around it are tried.
static const float k_start_scales[] = {0.46f, 0.50f, 0.54f, 0.58f, 0.62f, 0.66f, 0.72f};
// Start centres in units of d from the middle of the codes. Shifted starts find asymmetric fits, 3 % better on a Gaussian.
static const float k_start_shifts[] = {-0.4f, -0.2f, 0.0f, 0.2f, 0.4f};
enum {
    N_STARTS = sizeof(k_start_scales)/sizeof(k_start_scales[0]),
    N_SHIFTS = sizeof(k_start_shifts)/sizeof(k_start_shifts[0]),
    N_REFITS = 4,
};

// Return the codes in 0..top nearest to x/d + z; ties go up.
static inline ext_i32 nearest_codes(ext_f32 x, float inv_d, float z, float top) {
    return __builtin_convertvector(ext_clamp(x*inv_d + z, 0.0f, top) + 0.5f, ext_i32);
}

static inline float inverse(float d) {
    return d != 0.0f ? 1.0f/d : 0.0f;
}

// Return the squared error of the best codes for (d, z).
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

// Refit d and z by least squares to the codes that they give: minimize sum (x - (a*c + b))^2, d = a, z = -b/a. Return false if all codes
// are equal, the fit reverses their order, or d or z exceeds EXT_HALF_MAX. The sums of codes are integers below 2^24, so they are exact.
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

// Evaluate (d, z) as stored and keep them if they are the best so far.
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
    // Blocks far from Gaussian (one spike, or two values: a rotated impulse) need the full range.
    const float d = (s->max - s->min)/7.0f;
    if (d > 0.0f && d <= EXT_HALF_MAX) {
        refine(x, s->sum, d, -s->min/d, best);
        try_scale(x, d, -s->min/d, 7.0f, best);
    }
    // All values are equal (a rotated impulse at position 0): one step above zero, or below.
    if (d == 0.0f) {
        try_scale(x, fminf(fabsf(s->max), EXT_HALF_MAX), s->max > 0.0f ? 0.0f : 1.0f, 7.0f, best);
    }
}

// The paper's ternary codes (section "Training"): d = 0.798 sigma, z_p = -round(mean/d), codes clamp(round(x/d) + z_p, -1, 1), stored as
// 0, 1, 2, so z = z_p + 1. No search.
static void encode_ternary(const float * x, const struct ext_block_stats * s, struct best * best) {
    const ggml_half hd = ggml_fp32_to_fp16(fminf(0.798f*s->sigma, EXT_HALF_MAX));
    const float     d  = ggml_fp16_to_fp32(hd);
    const float     z  = d > 0.0f ? floorf(-s->mean/d + 0.5f) + 1.0f : 1.0f;
    best->err = FLT_MAX; // the paper keeps it even where zeros would be closer
    try_scale(x, d, fmaxf(-EXT_HALF_MAX, fminf(z, EXT_HALF_MAX)), 2.0f, best);
}

// --- under a Hessian -------------------------------------------------------------------------------------------------

static void set_levels(ggml_half d, ggml_half z, float level[EXT_LEVELS]) {
    for (int k = 0; k < EXT_LEVELS; ++k) {
        level[k] = ggml_fp16_to_fp32(d)*((float) k - ggml_fp16_to_fp32(z));
    }
}

// Refit d and z under fixed codes, from the normal equations of the levels. Return false as refit() does.
static bool refit_under_hessian(double a[EXT_LEVELS][EXT_LEVELS], double b[EXT_LEVELS], ggml_half * d, ggml_half * z) {
    // s, sc, scc: sums of a, a*code and a*code*code; sx, sxc: sums of b and b*code
    double s = 0, sc = 0, scc = 0, sx = 0, sxc = 0;
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

static inline __attribute__((always_inline)) void encode_block_under_hessian(struct ext_levels_block * in, uint8_t q[QK_K], struct best * out) {
    metric_find_optimum(in->metric, in->first, QK_K, in->x, in->goal, in->optimum);
    const struct ext_block_stats s = ext_block_stats(in->optimum);
    struct best start = {.err = s.energy};
    encode_eight_levels(in->optimum, &s, &start);
    float B_opt[QK_K], level[EXT_LEVELS];
    metric_multiply(QK_K, metric_schur(in->metric, in->first), in->optimum, B_opt);
    struct ext_levels_best best = {.cost = ext_dot(in->optimum, B_opt)}; // of d = 0
    uint8_t code[QK_K];
    ggml_half d = start.d, z = start.z;
    set_levels(d, z, level);
    ext_levels_init(in, level, code);
    for (int round = 0; round < EXT_LEVELS_ROUNDS; ++round) {
        const float before = best.cost;
        ext_levels_improve(in, level, code, &best);
        if (best.cost < before) {
            *out = (struct best) {best.cost, d, z};
        }
        double a[EXT_LEVELS][EXT_LEVELS], b[EXT_LEVELS];
        ext_levels_normal_equations(in, B_opt, code, a, b);
        if (!refit_under_hessian(a, b, &d, &z)) {
            break;
        }
        set_levels(d, z, level);
    }
    memcpy(q, best.code, sizeof(best.code));
}

// Encode by squared error, or as the paper's ternary.
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
static void encode_rows_under_hessian(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks,
                                      const struct ggml_ext_metric * metric) {
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        struct best best = {.d = EXT_HALF_NAN, .z = EXT_HALF_NAN}; // row validation refuses NaN
        uint8_t q[QK_K] = {0}, code_by_position[QK_K];
        float   level[EXT_LEVELS] = {0};
        if (ext_rows_load(&rows, src, true, in.x, in.goal)) {
            best = (struct best) {0};
            encode_block_under_hessian(&in, q, &best);
            set_levels(best.d, best.z, level);
        }
        float * errors = ext_rows_errors(&rows);
        for (int t = 0; t < QK_K; ++t) { // q is in the order of steps (metric.h), a block stores codes by position
            code_by_position[ggml_ext_trellis_position(QK_K, t)] = q[t];
            errors[t] = in.x[t] - level[q[t]];
        }
        ggml_ext_pack_itq3_s(code_by_position, best.d, best.z, &dst[rows.block]);
    }
    ext_rows_end(&rows);
}

void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    const bool ternary = params->itq3_levels == 3; // the paper has no importance
    if (params->metric && !ternary) {
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, params->metric);
        return;
    }
    if (importance && !ternary) {
        struct ggml_ext_metric * diagonal = metric_from_importance(GGML_TYPE_ITQ3_S, row_blocks*QK_K, QK_K, importance);
        GGML_ASSERT(diagonal != NULL);
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, diagonal);
        ggml_ext_metric_free(diagonal);
        return;
    }
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        float   x[QK_K];
        uint8_t q[QK_K] = {0}; // of a refused block
        struct best best = {0};
        if (!ext_load_rotated(src + ib*QK_K, x, QK_K)) {
            best.d = best.z = EXT_HALF_NAN; // row validation refuses NaN
        } else {
            encode_plain(x, ternary, q, &best);
        }
        ggml_ext_pack_itq3_s(q, best.d, best.z, &dst[ib]);
    }
}
