// Encoder of ITQ3_S. Every float operation has one order (see encode.h), so that the numpy reference gives the same
// bytes; the file is compiled with -ffp-contract=off.
#include "encode.h"

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

void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    (void) importance; // diagonal before the rotation, not after it: of no use to a scalar search
    const float top = params->itq3_levels == 3 ? 2.0f : 7.0f;
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        float   x[QK_K];
        uint8_t q[QK_K] = {0}; // of a refused block
        struct best best = {0};
        if (!ext_load_rotated(src + ib*QK_K, x, QK_K)) {
            best.d = best.z = EXT_HALF_NAN; // refused by row validation
        } else {
            const struct ext_block_stats s = ext_block_stats(x);
            best.err = s.energy; // of d = 0, which stays if nothing beats it
            if (params->itq3_levels == 3) {
                encode_ternary(x, &s, &best);
            } else {
                encode_eight_levels(x, &s, &best);
            }
            const float inv_d = inverse(ggml_fp16_to_fp32(best.d));
            for (int i = 0; i < QK_K; i += 4) {
                const ext_i32 c = nearest_codes(ext_load(x + i), inv_d, ggml_fp16_to_fp32(best.z), top);
                for (int l = 0; l < 4; ++l) {
                    q[i + l] = (uint8_t) c[l];
                }
            }
        }
        ggml_ext_pack_itq3_s(q, best.d, best.z, &dst[ib]);
    }
}
