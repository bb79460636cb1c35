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

// restrict: without it the bytes of q might be those of x, and nothing vectorises.
// q[j] = the code in 0..levels-1 nearest to x[j]/d + z; ties go up. Returns the squared error of d*(q - z) against x.
static float assign_codes(const float * restrict x, float d, float z, int levels, uint8_t * restrict q) {
    const float inv_d = d != 0.0f ? 1.0f/d : 0.0f;
    const float top   = (float) (levels - 1);
    float err[EXT_LANES] = {0};
    for (int i = 0; i < QK_K; i += EXT_LANES) {
        for (int l = 0; l < EXT_LANES; ++l) {
            float t = x[i + l]*inv_d + z;
            t = t > 0.0f ? t : 0.0f;
            t = t < top  ? t : top;
            const int32_t c = (int32_t) (t + 0.5f);
            const float   e = x[i + l] - d*((float) c - z);
            q[i + l] = (uint8_t) c;
            err[l] += e*e;
        }
    }
    return ext_sum_lanes(err);
}

// Least-squares d and z for fixed codes: minimises sum (x - (a*q + b))^2, d = a, z = -b/a. False when the codes are all
// equal or the fit turns the order of the codes around.
static bool refit(const float * restrict x, const uint8_t * restrict q, float sum_x, float * d, float * z) {
    float   qx[EXT_LANES] = {0};
    int32_t sq = 0, sqq = 0;
    for (int i = 0; i < QK_K; i += EXT_LANES) {
        for (int l = 0; l < EXT_LANES; ++l) {
            qx[l] += x[i + l]*(float) q[i + l];
            sq    += q[i + l];
            sqq   += q[i + l]*q[i + l];
        }
    }
    const int32_t det = QK_K*sqq - sq*sq; // at most 256*256*49: fits
    if (det == 0) {
        return false;
    }
    const double a = (QK_K*(double) ext_sum_lanes(qx) - (double) sq*(double) sum_x)/det;
    const double b = ((double) sum_x - a*sq)/QK_K;
    *d = (float) a;
    *z = (float) (-b/a);
    return *d > 0.0f && *d <= EXT_HALF_MAX && fabsf(*z) <= EXT_HALF_MAX;
}

struct best {
    float     err;
    ggml_half d, z;
    uint8_t   q[QK_K];
};

// Scores (d, z) as they will be stored and keeps them if they are the best so far.
static void try_scale(const float * x, float d, float z, int levels, struct best * best) {
    uint8_t   q[QK_K];
    const ggml_half hd = ggml_fp32_to_fp16(d);
    const ggml_half hz = ggml_fp32_to_fp16(z);
    const float     err = assign_codes(x, ggml_fp16_to_fp32(hd), ggml_fp16_to_fp32(hz), levels, q);
    if (err < best->err) {
        best->err = err;
        best->d   = hd;
        best->z   = hz;
        memcpy(best->q, q, sizeof(q));
    }
}

static void refine(const float * x, float sum_x, float d, float z, struct best * best) {
    uint8_t q[QK_K];
    for (int r = 0; r < N_REFITS; ++r) {
        assign_codes(x, d, z, 8, q);
        if (!refit(x, q, sum_x, &d, &z)) {
            return;
        }
    }
    try_scale(x, d, z, 8, best);
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
    // Blocks far from a bell, such as one spike (the rotation of a constant), want the whole range instead.
    const float d = (s->max - s->min)/7.0f;
    if (d > 0.0f && d <= EXT_HALF_MAX) {
        refine(x, s->sum, d, -s->min/d, best);
        try_scale(x, d, -s->min/d, 8, best);
    }
}

// The paper's ternary (section "Training"): d = 0.798 sigma, z_p = -round(mean/d), codes clamp(round(x/d) + z_p, -1, 1)
// stored as 0, 1, 2, so that z = z_p + 1. No search.
static void encode_ternary(const float * x, const struct ext_block_stats * s, struct best * best) {
    const ggml_half hd = ggml_fp32_to_fp16(fminf(0.798f*s->sigma, EXT_HALF_MAX));
    const float     d  = ggml_fp16_to_fp32(hd);
    const float     z  = d > 0.0f ? floorf(-s->mean/d + 0.5f) + 1.0f : 1.0f;
    best->err = FLT_MAX; // as printed, even where zeros would be closer
    try_scale(x, d, fmaxf(-EXT_HALF_MAX, fminf(z, EXT_HALF_MAX)), 3, best);
}

void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_blocks, const float * importance,
                            const struct ggml_ext_quantize_params * params) {
    (void) importance; // diagonal before the rotation, not after it: of no use to a scalar search
    for (int64_t ib = 0; ib < n_blocks; ++ib) {
        float x[QK_K];
        struct best best = {0};
        if (!ext_load_rotated(src + ib*QK_K, x)) {
            best.d = best.z = EXT_HALF_NAN; // refused by row validation
        } else {
            const struct ext_block_stats s = ext_block_stats(x);
            best.err = s.energy; // of the all-zero block, which stays if nothing beats it
            if (params->itq3_levels == 3) {
                encode_ternary(x, &s, &best);
            } else {
                encode_eight_levels(x, &s, &best);
            }
        }
        ggml_ext_pack_itq3_s(best.q, best.d, best.z, &dst[ib]);
    }
}
