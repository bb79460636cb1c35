// Where llama.cpp's types of codebooks keep what stands for their weights: value = step*level, the levels of a group of 4 or 8 weights
// those of a point of the codebook with a sign each, step = d*(scale + 1/2)*factor, d the half of the block, which begins with it, and
// scale an integer of 4 bits. Of types with even signs 7 of 8 are stored, and an even number is negative.
// Layouts: ggml-common.h and the dequantize_row functions of ggml-quants.c.
#pragma once

#include "encode.h"

// Bits of a block, counted from the lowest of the first byte: those of the i-th field begin at first + i*each + i/4*skip.
struct codebook_bits {
    int16_t bits, first, each, skip;
};

struct codebook_layout {
    enum ggml_type type;
    int   group, sub, columns; // weights: of a point, of a scale, of a decision
    int   n_points;
    float factor;
    struct codebook_bits point, high, sign, scale; // high: upper bits of the points; sign: of 8 weights
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

// NULL for other types.
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

// n fields from the block, or with `put` to it, as those bits of v that are from `from` on.
static inline void codebook_copy(bool put, const struct codebook_bits * f, uint8_t * block, int * v, int n, int from) {
    for (int i = 0; i < n; ++i) {
        const int at = f->first + i*f->each + i/4*f->skip;
        for (int b = 0, bits; b < f->bits; b += bits) {
            uint8_t * byte = block + (at + b)/8;
            const int shift = (at + b)%8, mask_bits = f->bits - b < 8 - shift ? f->bits - b : 8 - shift, mask = (1 << mask_bits) - 1;
            bits = mask_bits;
            if (put) {
                *byte = (uint8_t) ((*byte & ~(mask << shift)) | (v[i] >> (from + b) & mask) << shift);
            } else {
                v[i] |= (*byte >> shift & mask) << (from + b);
            }
        }
    }
}

static inline void codebook_copy_all(bool put, const struct codebook_layout * t, void * block, struct codebook_block * x) {
    codebook_copy(put, &t->point, block, x->point, QK_K/t->group, 0);
    codebook_copy(put, &t->high, block, x->point, QK_K/t->group, t->point.bits);
    codebook_copy(put, &t->sign, block, x->sign, QK_K/8, 0);
    codebook_copy(put, &t->scale, block, x->scale, QK_K/t->sub, 0);
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
