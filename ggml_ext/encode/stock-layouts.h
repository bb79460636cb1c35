// Where llama.cpp's scalar types keep what stands for their weights: value = base + step*level, level one of 16 of a table, or an
// integer, and of each sub-block
//   K-quants, IQ4_XS   step = d*scale, base = -dmin*min, d and dmin halves of the block, scale and min small integers
//   the others         step = d, base = m, halves
// Layouts: ggml-common.h and the dequantize_row functions of ggml-quants.c.
#pragma once

#include "encode.h"

struct stock_layout {
    enum ggml_type type;
    int  block, sub;                      // weights
    int  low, high;                       // levels; indices where there is a table
    bool has_table, has_min;
    int  scale_low, scale_high, min_high; // 0: scale and min are halves
};

// One block, of up to 16 sub-blocks. d and dmin: in types without integers the scale and the min themselves.
struct stock_block {
    float   d, dmin;
    int     scale[16], min[16];
    uint8_t code[QK_K]; // level - low
};

static const struct stock_layout k_stock_layouts[] = {
    //  type              block sub    levels     table  min    scales
    {GGML_TYPE_Q2_K,      256,  16,    0,   3,    false, true,  0, 15, 15},
    {GGML_TYPE_Q3_K,      256,  16,   -4,   3,    false, false, -32, 31, 0},
    {GGML_TYPE_Q4_K,      256,  32,    0,  15,    false, true,  0, 63, 63},
    {GGML_TYPE_Q5_K,      256,  32,    0,  31,    false, true,  0, 63, 63},
    {GGML_TYPE_Q6_K,      256,  16,  -32,  31,    false, false, -128, 127, 0},
    {GGML_TYPE_IQ4_XS,    256,  32,    0,  15,    true,  false, -32, 31, 0},
    {GGML_TYPE_Q4_0,       32,  32,   -8,   7,    false, false, 0, 0, 0},
    {GGML_TYPE_Q4_1,       32,  32,    0,  15,    false, true,  0, 0, 0},
    {GGML_TYPE_Q5_0,       32,  32,  -16,  15,    false, false, 0, 0, 0},
    {GGML_TYPE_Q5_1,       32,  32,    0,  31,    false, true,  0, 0, 0},
    {GGML_TYPE_IQ4_NL,     32,  32,    0,  15,    true,  false, 0, 0, 0},
};

// NULL for other types.
static inline const struct stock_layout * stock_layout(enum ggml_type type) {
    for (size_t i = 0; i < sizeof(k_stock_layouts)/sizeof(k_stock_layouts[0]); ++i) {
        if (k_stock_layouts[i].type == type) {
            return k_stock_layouts + i;
        }
    }
    return NULL;
}

// --- packed codes: load and store alike, `put` says which way --------------------------------------------------------

// `bits` bits of *byte from `shift` on, from or to those of *code from `from` on.
static inline void stock_bits(bool put, uint8_t * byte, int shift, int bits, uint8_t * code, int from) {
    const int mask = (1 << bits) - 1;
    if (put) {
        *byte = (uint8_t) ((*byte & ~(mask << shift)) | (*code >> from & mask) << shift);
    } else {
        *code = (uint8_t) ((*code & ~(mask << from)) | (*byte >> shift & mask) << from);
    }
}

// 32 codes a row of 16 bytes: the first half in the low nibbles. Q4_0, IQ4_XS and their like.
static inline void stock_nibbles(bool put, uint8_t * qs, uint8_t * code, int n) {
    for (int j = 0; j < n; ++j) {
        stock_bits(put, qs + j/32*16 + j%16, j%32/16*4, 4, code + j, 0);
    }
}

// 64 codes a row of 32 bytes. Q4_K and Q5_K.
static inline void stock_nibbles_64(bool put, uint8_t * qs, uint8_t * code) {
    for (int j = 0; j < QK_K; ++j) {
        stock_bits(put, qs + j/64*32 + j%32, j%64/32*4, 4, code + j, 0);
    }
}

// Two bits of 128 codes a row of 32 bytes. Q2_K and Q3_K, and the upper ones of Q6_K.
static inline void stock_pairs(bool put, uint8_t * qs, uint8_t * code, int from) {
    for (int j = 0; j < QK_K; ++j) {
        stock_bits(put, qs + j/128*32 + j%32, j%128/32*2, 2, code + j, from);
    }
}

static inline void stock_copy_codes(bool put, const struct stock_layout * t, void * block, uint8_t * code) {
    switch ((int) t->type) {
        case GGML_TYPE_Q2_K: stock_pairs(put, ((block_q2_K *) block)->qs, code, 0); break;
        case GGML_TYPE_Q3_K:
            stock_pairs(put, ((block_q3_K *) block)->qs, code, 0);
            for (int j = 0; j < QK_K; ++j) {
                stock_bits(put, ((block_q3_K *) block)->hmask + j%32, j/32, 1, code + j, 2);
            }
            break;
        case GGML_TYPE_Q4_K: stock_nibbles_64(put, ((block_q4_K *) block)->qs, code); break;
        case GGML_TYPE_Q5_K:
            stock_nibbles_64(put, ((block_q5_K *) block)->qs, code);
            for (int j = 0; j < QK_K; ++j) {
                stock_bits(put, ((block_q5_K *) block)->qh + j%32, j/32, 1, code + j, 4);
            }
            break;
        case GGML_TYPE_Q6_K:
            for (int j = 0; j < QK_K; ++j) {
                stock_bits(put, ((block_q6_K *) block)->ql + j/128*64 + j%64, j%128/64*4, 4, code + j, 0);
            }
            stock_pairs(put, ((block_q6_K *) block)->qh, code, 4);
            break;
        case GGML_TYPE_IQ4_XS: stock_nibbles(put, ((block_iq4_xs *) block)->qs, code, QK_K); break;
        case GGML_TYPE_Q4_0:   stock_nibbles(put, ((block_q4_0 *) block)->qs, code, 32); break;
        case GGML_TYPE_Q4_1:   stock_nibbles(put, ((block_q4_1 *) block)->qs, code, 32); break;
        case GGML_TYPE_IQ4_NL: stock_nibbles(put, ((block_iq4_nl *) block)->qs, code, 32); break;
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1: {
            const bool has_min = t->type == GGML_TYPE_Q5_1;
            stock_nibbles(put, has_min ? ((block_q5_1 *) block)->qs : ((block_q5_0 *) block)->qs, code, 32);
            uint8_t * qh = has_min ? ((block_q5_1 *) block)->qh : ((block_q5_0 *) block)->qh;
            for (int j = 0; j < 32; ++j) {
                stock_bits(put, qh + j/8, j%8, 1, code + j, 4);
            }
            break;
        }
    }
}

// --- scales ----------------------------------------------------------------------------------------------------------

// `bits` bits of a small integer, as stock_bits().
static inline void stock_scale_bits(bool put, uint8_t * byte, int shift, int bits, int * scale, int from) {
    uint8_t code = (uint8_t) *scale;
    stock_bits(put, byte, shift, bits, &code, from);
    *scale = put ? *scale : (int) code;
}

// Integers of the sub-blocks, from 0 on. dst: their bytes.
static inline void stock_copy_scales(bool put, enum ggml_type type, void * block, int * scale, int * min) {
    switch ((int) type) {
        case GGML_TYPE_Q2_K:
            for (int s = 0; s < 16; ++s) {
                stock_scale_bits(put, ((block_q2_K *) block)->scales + s, 0, 4, scale + s, 0);
                stock_scale_bits(put, ((block_q2_K *) block)->scales + s, 4, 4, min + s, 0);
            }
            break;
        case GGML_TYPE_Q3_K:
            for (int s = 0; s < 16; ++s) {
                uint8_t * at = ((block_q3_K *) block)->scales;
                stock_scale_bits(put, at + s%8, s/8*4, 4, scale + s, 0);
                stock_scale_bits(put, at + 8 + s%4, s/4*2, 2, scale + s, 4);
            }
            break;
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            for (int s = 0; s < 8; ++s) {
                uint8_t * at = type == GGML_TYPE_Q4_K ? ((block_q4_K *) block)->scales : ((block_q5_K *) block)->scales;
                stock_scale_bits(put, at + (s < 4 ? s : s + 4), 0, s < 4 ? 6 : 4, scale + s, 0);
                stock_scale_bits(put, at + s + 4, s < 4 ? 0 : 4, s < 4 ? 6 : 4, min + s, 0);
                if (s >= 4) {
                    stock_scale_bits(put, at + s - 4, 6, 2, scale + s, 4);
                    stock_scale_bits(put, at + s, 6, 2, min + s, 4);
                }
            }
            break;
        case GGML_TYPE_Q6_K:
            for (int s = 0; s < 16; ++s) {
                int8_t * at = ((block_q6_K *) block)->scales + s;
                if (put) {
                    *at = (int8_t) (scale[s] - 128);
                }
                scale[s] = *at + 128;
            }
            break;
        case GGML_TYPE_IQ4_XS:
            for (int s = 0; s < 8; ++s) {
                block_iq4_xs * b = block;
                uint8_t high = (uint8_t) (b->scales_h >> 8*(s/4)); // of a field of 16 bits
                stock_scale_bits(put, b->scales_l + s/2, s%2*4, 4, scale + s, 0);
                stock_scale_bits(put, &high, s%4*2, 2, scale + s, 4);
                b->scales_h = (uint16_t) ((b->scales_h & (s < 4 ? 0xff00 : 0x00ff)) | high << 8*(s/4));
            }
            break;
    }
}

// The halves of a block; *min is NULL where there is one scale alone.
static inline void stock_halves(enum ggml_type type, void * block, ggml_half ** d, ggml_half ** min) {
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
    }
}

static inline void stock_load(const struct stock_layout * t, void * block, struct stock_block * x) {
    ggml_half * d, * min;
    memset(x, 0, sizeof(*x));
    stock_halves(t->type, block, &d, &min);
    x->d    = ggml_fp16_to_fp32(*d);
    x->dmin = min ? ggml_fp16_to_fp32(*min) : 0;
    stock_copy_scales(false, t->type, block, x->scale, x->min);
    for (int s = 0; s < t->block/t->sub; ++s) {
        x->scale[s] += t->scale_low;
    }
    stock_copy_codes(false, t, block, x->code);
}

static inline void stock_store(const struct stock_layout * t, const struct stock_block * x, void * block) {
    struct stock_block y = *x;
    ggml_half * d, * min;
    stock_halves(t->type, block, &d, &min);
    *d = ggml_fp32_to_fp16(x->d);
    if (min) {
        *min = ggml_fp32_to_fp16(x->dmin);
    }
    for (int s = 0; s < t->block/t->sub; ++s) {
        y.scale[s] -= t->scale_low;
    }
    stock_copy_scales(true, t->type, block, y.scale, y.min);
    stock_copy_codes(true, t, block, y.code);
}
