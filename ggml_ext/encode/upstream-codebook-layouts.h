// The layouts of upstream's codebook types: value = step*level, step = d*(scale + 1/2)*factor. A group of 4 or 8 weights has the levels of
// a codebook point, with a sign each. d is a half at the start of the block, scale an integer of 4 bits. Types with even signs store 7 of
// 8 signs; an even number is negative. See ggml-common.h, and the dequantize_row functions of ggml-quants.c.
#pragma once

#include "encode.h"

// Bit fields of a block; bit 0 is the lowest of the first byte. Field i begins at first + i*stride + i/4*skip.
struct codebook_bits {
    int16_t bits, first, stride, skip;
};

struct codebook_layout {
    enum ggml_type type;
    int   group, sub, columns; // weights per point, per scale, per decision
    int   n_points;
    float factor;
    struct codebook_bits point, high, sign, scale; // high: upper bits of the points; sign: per 8 weights
};

static const struct codebook_layout k_codebook_layouts[] = {
    //  type            group sub columns points factor  point           high            sign            scale
    {GGML_TYPE_IQ2_XXS, 8,    32, 8,       256,  0.25f, {8, 16,  8, 32}, {0, 0, 0, 0},   {7,  48,  7, 36}, {4,  76, 64, 0}},
    {GGML_TYPE_IQ2_XS,  8,    16, 8,       512,  0.25f, {9, 16, 16,  0}, {0, 0, 0, 0},   {7,  25, 16,  0}, {4, 528,  4, 0}},
    {GGML_TYPE_IQ2_S,   8,    16, 8,      1024,  0.25f, {8, 16,  8,  0}, {2, 528, 2, 0}, {8, 272,  8,  0}, {4, 592,  4, 0}},
    {GGML_TYPE_IQ3_XXS, 4,    32, 8,       256,  0.5f,  {8, 16,  8,  0}, {0, 0, 0, 0},   {7, 528,  7,  4}, {4, 556, 32, 0}},
    {GGML_TYPE_IQ3_S,   4,    32, 4,       512,  2.0f,  {8, 16,  8,  0}, {1, 528, 1, 0}, {8, 592,  8,  0}, {4, 848,  4, 0}},
};

struct codebook_block {
    float d;
    int   scale[QK_K/16], point[QK_K/4];
    int   sign[QK_K/8]; // 8 bits each
};

// Return NULL for other types.
static inline const struct codebook_layout * codebook_layout(enum ggml_type type) {
    for (size_t i = 0; i < sizeof(k_codebook_layouts)/sizeof(k_codebook_layouts[0]); ++i) {
        if (k_codebook_layouts[i].type == type) {
            return k_codebook_layouts + i;
        }
    }
    return NULL;
}

static inline bool codebook_even_signs(const struct codebook_layout * t) {
    return t->sign.bits == 7;
}

// Copy n fields to or from the block. A field holds the bits of v from `first_bit` on.
static inline void codebook_copy(bool store, const struct codebook_bits * f, uint8_t * block, int * v, int n, int first_bit) {
    for (int i = 0; i < n; ++i) {
        const int bit = f->first + i*f->stride + i/4*f->skip;
        for (int b = 0, bits; b < f->bits; b += bits) {
            uint8_t * byte = block + (bit + b)/8;
            const int shift = (bit + b)%8, mask_bits = f->bits - b < 8 - shift ? f->bits - b : 8 - shift, mask = (1 << mask_bits) - 1;
            bits = mask_bits;
            if (store) {
                *byte = (uint8_t) ((*byte & ~(mask << shift)) | (v[i] >> (first_bit + b) & mask) << shift);
            } else {
                v[i] |= (*byte >> shift & mask) << (first_bit + b);
            }
        }
    }
}

static inline void codebook_copy_all(bool store, const struct codebook_layout * t, void * block, struct codebook_block * x) {
    codebook_copy(store, &t->point, block, x->point, QK_K/t->group, 0);
    codebook_copy(store, &t->high, block, x->point, QK_K/t->group, t->point.bits);
    codebook_copy(store, &t->sign, block, x->sign, QK_K/8, 0);
    codebook_copy(store, &t->scale, block, x->scale, QK_K/t->sub, 0);
}

static inline void codebook_load(const struct codebook_layout * t, void * block, struct codebook_block * x) {
    ggml_half d;
    memset(x, 0, sizeof(*x));
    memcpy(&d, block, sizeof(d));
    x->d = ggml_fp16_to_fp32(d);
    codebook_copy_all(false, t, block, x);
    for (int i = 0; i < QK_K/8 && codebook_even_signs(t); ++i) {
        x->sign[i] |= (__builtin_popcount((unsigned) x->sign[i]) & 1) << 7;
    }
}

static inline void codebook_store(const struct codebook_layout * t, struct codebook_block * x, void * block) {
    const ggml_half d = ggml_fp32_to_fp16(x->d);
    memcpy(block, &d, sizeof(d));
    codebook_copy_all(true, t, block, x);
}
