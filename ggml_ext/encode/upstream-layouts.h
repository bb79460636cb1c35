// The layouts of upstream's scalar types: value = base + step*level. level is an integer or an entry of a table. Per sub-block:
//   K-quants, IQ4_XS   step = d*scale, base = -dmin*min; d and dmin are halves of the block, scale and min small integers
//   MXFP4, NVFP4       step = d, a float of eight bits
//   the others         step = d, base = m; both are halves
// See ggml-common.h, and the dequantize_row functions of ggml-quants.c.
#pragma once

#include "encode.h"

enum upstream_levels { INTEGERS, LEVELS_IQ4, LEVELS_FP4, LEVELS_SIGN };
enum upstream_scale  { HALF, E8M0, UE4M3 };

// First steps to try: the largest weight times first + k*step, k = 0 .. STEP_CANDIDATES - 1. step = 0: upstream's only.
struct upstream_search {
    float first, step;
    bool  negative; // also negative ones
};

struct upstream_layout {
    enum ggml_type type;
    int  block, sub;                      // weights
    int  low, high;                       // levels; with a table, indices
    enum upstream_levels levels;
    bool has_min;
    int  scale_low, scale_high, min_high; // 0: scale and min are floats
    enum upstream_scale  scale;           // format of these
    struct upstream_search search;
};

// One block of up to 16 sub-blocks. Types without integers: d and dmin are scale and min. Types with steps of eight bits: scale has the bits.
struct upstream_block {
    float   d, dmin;
    int     scale[16], min[16];
    uint8_t code[QK_K]; // level - low
};

static const struct upstream_layout k_upstream_layouts[] = {
    //  type             block sub   range     levels       min    integer scales  format first steps
    {GGML_TYPE_Q2_K,   256,  16,   0,  3,  INTEGERS,    true,     0,  15, 15,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q3_K,   256,  16,  -4,  3,  INTEGERS,    false,  -32,  31,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q4_K,   256,  32,   0, 15,  INTEGERS,    true,     0,  63, 63,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q5_K,   256,  32,   0, 31,  INTEGERS,    true,     0,  63, 63,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q6_K,   256,  16, -32, 31,  INTEGERS,    false, -128, 127,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_IQ4_XS, 256,  32,   0, 15,  LEVELS_IQ4,  false,  -32,  31,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q4_0,    32,  32,  -8,  7,  INTEGERS,    false,    0,   0,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q4_1,    32,  32,   0, 15,  INTEGERS,    true,     0,   0,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q5_0,    32,  32, -16, 15,  INTEGERS,    false,    0,   0,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q5_1,    32,  32,   0, 31,  INTEGERS,    true,     0,   0,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_IQ4_NL,  32,  32,   0, 15,  LEVELS_IQ4,  false,    0,   0,  0,  HALF,  {0, 0, false}},
    {GGML_TYPE_Q2_0,    64,  64,  -1,  2,  INTEGERS,    false,    0,   0,  0,  HALF,  {0.0625f, 0.03125f, true}},
    {GGML_TYPE_Q1_0,   128, 128,   0,  1,  LEVELS_SIGN, false,    0,   0,  0,  HALF,  {0.0625f, 0.03125f, false}},
    {GGML_TYPE_MXFP4,   32,  32,   0, 14,  LEVELS_FP4,  false,    0,   0,  0,  E8M0,  {0.0390625f, 0.0078125f, false}},
    {GGML_TYPE_NVFP4,   64,  16,   0, 14,  LEVELS_FP4,  false,    0,   0,  0,  UE4M3, {0.0625f, 0.00390625f, false}},
};

// Levels by index, of which the index of a code is the position. FP4: twice the E2M1 values, sorted; its second zero is not used.
static const int8_t k_levels_fp4[]  = {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12};
static const int8_t k_levels_sign[] = {-1, 1};

// Return NULL for other types.
static inline const struct upstream_layout * upstream_layout(enum ggml_type type) {
    for (size_t i = 0; i < sizeof(k_upstream_layouts)/sizeof(k_upstream_layouts[0]); ++i) {
        if (k_upstream_layouts[i].type == type) {
            return k_upstream_layouts + i;
        }
    }
    return NULL;
}

// --- packed codes: one function copies in both directions, `store` tells which ---------------------------------------

// Copy `bits` bits of *code from bit `first` on to or from *byte at `shift`.
static inline void upstream_copy_bits(bool store, uint8_t * byte, int shift, int bits, uint8_t * code, int first) {
    const int mask = (1 << bits) - 1;
    if (store) {
        *byte = (uint8_t) ((*byte & ~(mask << shift)) | (*code >> first & mask) << shift);
    } else {
        *code = (uint8_t) ((*code & ~(mask << first)) | (*byte >> shift & mask) << first);
    }
}

// Q4_0, IQ4_XS and similar: 16 bytes per 32 codes, the first half in the low nibbles.
static inline void upstream_copy_nibbles(bool store, uint8_t * qs, uint8_t * code, int n) {
    for (int j = 0; j < n; ++j) {
        upstream_copy_bits(store, qs + j/32*16 + j%16, j%32/16*4, 4, code + j, 0);
    }
}

// Q4_K and Q5_K: 32 bytes per 64 codes.
static inline void upstream_copy_nibbles_64(bool store, uint8_t * qs, uint8_t * code) {
    for (int j = 0; j < QK_K; ++j) {
        upstream_copy_bits(store, qs + j/64*32 + j%32, j%64/32*4, 4, code + j, 0);
    }
}

// Q2_K, Q3_K and the upper bits of Q6_K: 32 bytes per 128 codes, two bits each.
static inline void upstream_copy_pairs(bool store, uint8_t * qs, uint8_t * code, int first) {
    for (int j = 0; j < QK_K; ++j) {
        upstream_copy_bits(store, qs + j/128*32 + j%32, j%128/32*2, 2, code + j, first);
    }
}

// Turn an FP4 code into its index in k_levels_fp4, or back. The second zero, code 8, becomes the first.
static inline uint8_t upstream_swap_fp4(bool store, uint8_t v) {
    return (uint8_t) (store ? (v < 7 ? 15 - v : v - 7) : v > 8 ? 15 - v : 7 + v%8);
}

static inline void upstream_copy_codes(bool store, const struct upstream_layout * t, void * block, uint8_t * code) {
    switch ((int) t->type) {
        case GGML_TYPE_Q2_K: upstream_copy_pairs(store, ((block_q2_K *) block)->qs, code, 0); break;
        case GGML_TYPE_Q3_K:
            upstream_copy_pairs(store, ((block_q3_K *) block)->qs, code, 0);
            for (int j = 0; j < QK_K; ++j) {
                upstream_copy_bits(store, ((block_q3_K *) block)->hmask + j%32, j/32, 1, code + j, 2);
            }
            break;
        case GGML_TYPE_Q4_K: upstream_copy_nibbles_64(store, ((block_q4_K *) block)->qs, code); break;
        case GGML_TYPE_Q5_K:
            upstream_copy_nibbles_64(store, ((block_q5_K *) block)->qs, code);
            for (int j = 0; j < QK_K; ++j) {
                upstream_copy_bits(store, ((block_q5_K *) block)->qh + j%32, j/32, 1, code + j, 4);
            }
            break;
        case GGML_TYPE_Q6_K:
            for (int j = 0; j < QK_K; ++j) {
                upstream_copy_bits(store, ((block_q6_K *) block)->ql + j/128*64 + j%64, j%128/64*4, 4, code + j, 0);
            }
            upstream_copy_pairs(store, ((block_q6_K *) block)->qh, code, 4);
            break;
        case GGML_TYPE_IQ4_XS: upstream_copy_nibbles(store, ((block_iq4_xs *) block)->qs, code, QK_K); break;
        case GGML_TYPE_Q4_0:   upstream_copy_nibbles(store, ((block_q4_0 *) block)->qs, code, 32); break;
        case GGML_TYPE_Q4_1:   upstream_copy_nibbles(store, ((block_q4_1 *) block)->qs, code, 32); break;
        case GGML_TYPE_IQ4_NL: upstream_copy_nibbles(store, ((block_iq4_nl *) block)->qs, code, 32); break;
        case GGML_TYPE_MXFP4:  upstream_copy_nibbles(store, ((block_mxfp4 *) block)->qs, code, 32); break;
        case GGML_TYPE_NVFP4:
            for (int j = 0; j < QK_NVFP4; ++j) {
                upstream_copy_bits(store, ((block_nvfp4 *) block)->qs + j/16*8 + j%8, j%16/8*4, 4, code + j, 0);
            }
            break;
        case GGML_TYPE_Q2_0:
            for (int j = 0; j < QK2_0; ++j) {
                upstream_copy_bits(store, ((block_q2_0 *) block)->qs + j/4, j%4*2, 2, code + j, 0);
            }
            break;
        case GGML_TYPE_Q1_0:
            for (int j = 0; j < QK1_0; ++j) {
                upstream_copy_bits(store, ((block_q1_0 *) block)->qs + j/8, j%8, 1, code + j, 0);
            }
            break;
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1: {
            const bool has_min = t->type == GGML_TYPE_Q5_1;
            upstream_copy_nibbles(store, has_min ? ((block_q5_1 *) block)->qs : ((block_q5_0 *) block)->qs, code, 32);
            uint8_t * qh = has_min ? ((block_q5_1 *) block)->qh : ((block_q5_0 *) block)->qh;
            for (int j = 0; j < 32; ++j) {
                upstream_copy_bits(store, qh + j/8, j%8, 1, code + j, 4);
            }
            break;
        }
    }
}

// --- scales ----------------------------------------------------------------------------------------------------------

static inline void upstream_copy_scale_bits(bool store, uint8_t * byte, int shift, int bits, int * scale, int first) {
    uint8_t code = (uint8_t) *scale;
    upstream_copy_bits(store, byte, shift, bits, &code, first);
    *scale = store ? *scale : (int) code;
}

// Integers of the sub-blocks, from 0 on.
static inline void upstream_copy_scales(bool store, enum ggml_type type, void * block, int * scale, int * min) {
    switch ((int) type) {
        case GGML_TYPE_Q2_K:
            for (int s = 0; s < 16; ++s) {
                upstream_copy_scale_bits(store, ((block_q2_K *) block)->scales + s, 0, 4, scale + s, 0);
                upstream_copy_scale_bits(store, ((block_q2_K *) block)->scales + s, 4, 4, min + s, 0);
            }
            break;
        case GGML_TYPE_Q3_K:
            for (int s = 0; s < 16; ++s) {
                uint8_t * scales = ((block_q3_K *) block)->scales;
                upstream_copy_scale_bits(store, scales + s%8, s/8*4, 4, scale + s, 0);
                upstream_copy_scale_bits(store, scales + 8 + s%4, s/4*2, 2, scale + s, 4);
            }
            break;
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            for (int s = 0; s < 8; ++s) {
                uint8_t * scales = type == GGML_TYPE_Q4_K ? ((block_q4_K *) block)->scales : ((block_q5_K *) block)->scales;
                upstream_copy_scale_bits(store, scales + (s < 4 ? s : s + 4), 0, s < 4 ? 6 : 4, scale + s, 0);
                upstream_copy_scale_bits(store, scales + s + 4, s < 4 ? 0 : 4, s < 4 ? 6 : 4, min + s, 0);
                if (s >= 4) {
                    upstream_copy_scale_bits(store, scales + s - 4, 6, 2, scale + s, 4);
                    upstream_copy_scale_bits(store, scales + s, 6, 2, min + s, 4);
                }
            }
            break;
        case GGML_TYPE_Q6_K:
            for (int s = 0; s < 16; ++s) {
                int8_t * scales = ((block_q6_K *) block)->scales + s;
                if (store) {
                    *scales = (int8_t) (scale[s] - 128);
                }
                scale[s] = *scales + 128;
            }
            break;
        case GGML_TYPE_IQ4_XS:
            for (int s = 0; s < 8; ++s) {
                block_iq4_xs * b = block;
                uint8_t high = (uint8_t) (b->scales_h >> 8*(s/4)); // one half of a field of 16 bits
                upstream_copy_scale_bits(store, b->scales_l + s/2, s%2*4, 4, scale + s, 0);
                upstream_copy_scale_bits(store, &high, s%4*2, 2, scale + s, 4);
                b->scales_h = (uint16_t) ((b->scales_h & (s < 4 ? 0xff00 : 0x00ff)) | high << 8*(s/4));
            }
            break;
    }
}

// The FP16 scales d and min of a block; NULL in types without them.
static inline void upstream_get_fp16(enum ggml_type type, void * block, ggml_half ** d, ggml_half ** min) {
    *d = *min = NULL;
    switch ((int) type) {
        case GGML_TYPE_Q2_K:   *d = &((block_q2_K *) block)->d; *min = &((block_q2_K *) block)->dmin; break;
        case GGML_TYPE_Q3_K:   *d = &((block_q3_K *) block)->d; break;
        case GGML_TYPE_Q4_K:   *d = &((block_q4_K *) block)->d; *min = &((block_q4_K *) block)->dmin; break;
        case GGML_TYPE_Q5_K:   *d = &((block_q5_K *) block)->d; *min = &((block_q5_K *) block)->dmin; break;
        case GGML_TYPE_Q6_K:   *d = &((block_q6_K *) block)->d; break;
        case GGML_TYPE_IQ4_XS: *d = &((block_iq4_xs *) block)->d; break;
        case GGML_TYPE_Q4_0:   *d = &((block_q4_0 *) block)->d; break;
        case GGML_TYPE_Q4_1:   *d = &((block_q4_1 *) block)->d; *min = &((block_q4_1 *) block)->m; break;
        case GGML_TYPE_Q5_0:   *d = &((block_q5_0 *) block)->d; break;
        case GGML_TYPE_Q5_1:   *d = &((block_q5_1 *) block)->d; *min = &((block_q5_1 *) block)->m; break;
        case GGML_TYPE_IQ4_NL: *d = &((block_iq4_nl *) block)->d; break;
        case GGML_TYPE_Q2_0:   *d = &((block_q2_0 *) block)->d; break;
        case GGML_TYPE_Q1_0:   *d = &((block_q1_0 *) block)->d; break;
    }
}

// --- steps of eight bits: half the scales, as levels of FP4 are twice its values -------------------------------------

// Return the step nearest to v. Those below 2^-126 count as 0: their inverse is not a float.
static inline float upstream_round_step(enum upstream_scale scale, float v) {
    const float largest = scale == E8M0 ? 0x1p126f : 224;
    int exponent;
    if (!(v >= (scale == E8M0 ? 0x1.8p-127f : 0))) {
        return 0;
    }
    const float mantissa = frexpf(v < largest ? v : largest, &exponent); // 0.5 to 1
    if (scale == E8M0) {
        return ldexpf(1, mantissa < 0.75f ? exponent - 1 : exponent);
    }
    const int unit = (exponent < -6 ? -6 : exponent) - 4; // four significant bits; subnormal below 2^-7
    return ldexpf(rintf(ldexpf(mantissa, exponent - unit)), unit);
}

static inline float upstream_get_step(enum upstream_scale scale, int bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (scale == E8M0) {
        return bits < 2 ? 0 : ldexpf(1, bits - 128);
    }
    return bits == 0x7f ? 0 : exponent == 0 ? ldexpf((float) mantissa, -10) : ldexpf((float) (8 + mantissa), exponent - 11);
}

static inline int upstream_get_step_bits(enum upstream_scale scale, float step) {
    int exponent;
    const float mantissa = frexpf(step, &exponent);
    if (step == 0 || scale == E8M0) {
        return step == 0 ? 0 : exponent + 127;
    }
    return exponent < -6 ? (int) ldexpf(step, 10) : (exponent + 7) << 3 | ((int) (mantissa*16) - 8);
}

// --- blocks ----------------------------------------------------------------------------------------------------------

static inline void upstream_load(const struct upstream_layout * t, void * block, struct upstream_block * x) {
    ggml_half * d, * min;
    memset(x, 0, sizeof(*x));
    upstream_get_fp16(t->type, block, &d, &min);
    x->d    = d ? ggml_fp16_to_fp32(*d) : 0;
    x->dmin = min ? ggml_fp16_to_fp32(*min) : 0;
    upstream_copy_scales(false, t->type, block, x->scale, x->min);
    const uint8_t * steps = t->scale == HALF ? NULL : block; // these blocks begin with them
    for (int s = 0; s < t->block/t->sub; ++s) {
        x->scale[s] = steps ? steps[s] : x->scale[s] + t->scale_low;
    }
    upstream_copy_codes(false, t, block, x->code);
    for (int i = 0; i < t->block && t->levels == LEVELS_FP4; ++i) {
        x->code[i] = upstream_swap_fp4(false, x->code[i]);
    }
}

static inline void upstream_store(const struct upstream_layout * t, const struct upstream_block * x, void * block) {
    struct upstream_block y = *x;
    ggml_half * d, * min;
    upstream_get_fp16(t->type, block, &d, &min);
    if (d) {
        *d = ggml_fp32_to_fp16(x->d);
    }
    if (min) {
        *min = ggml_fp32_to_fp16(x->dmin);
    }
    uint8_t * steps = t->scale == HALF ? NULL : block;
    for (int s = 0; s < t->block/t->sub; ++s) {
        y.scale[s] -= t->scale_low;
        if (steps) {
            steps[s] = (uint8_t) y.scale[s];
        }
    }
    for (int i = 0; i < t->block && t->levels == LEVELS_FP4; ++i) {
        y.code[i] = upstream_swap_fp4(true, y.code[i]);
    }
    upstream_copy_scales(true, t->type, block, y.scale, y.min);
    upstream_copy_codes(true, t, block, y.code);
}
