// DITTO5: index into one codebook of 32 values, the same for all blocks of all models, on weights rotated by R = H S.
//
//   w[0..255] = S H v,   v[j] = d * (q[j] - 63.5)                                              (ggml-ext-rotation.h)
//   q[j] = C[i[j] & 15] ^ (i[j] & 16 ? 127 : 0),   C the upper half of the codebook: GGML_EXT_DITTO5_CODEBOOK of codes.h
//
//   byte  0  2          130        162
//         d  ql (128)   qh (32)                                   162 bytes for 256 weights: 5.0625 bits a weight
//
//   low  = ql[64*(g%4/2) + 32*(g/4) + j%32] >> 4*(g%2) & 15,  g = j/32      one load of 64 bytes serves four groups of 32
//   high = qh[j%32] >> g & 1                                                of kernels that take g and g + 4 together
//   i    = low | high << 4
//
// Source: Ditto, section 3.2, has a codebook for each matrix. Rotated weights are Gaussian in every matrix of every model, so one
// codebook does for all; what blocks differ by is their scale. It is symmetric, so that half of it is looked up: 127 - q is the
// code of the opposite value. docs/results/variants.md has what each of these choices is worth.
#pragma once

#include "../ggml-ext-common.h"
#include "codes.h"

typedef struct {
    ggml_half d;       // scale of the codebook
    uint8_t   ql[128]; // low four bits of the indices
    uint8_t   qh[32];  // their high bit, the sign
} block_ditto5;
#define DITTO5_OFFSET GGML_EXT_DITTO5_CODEBOOK_OFFSET
static_assert(sizeof(block_ditto5) == sizeof(ggml_half) + QK_K/2 + QK_K/8, "DITTO5 is 162 bytes");

GGML_EXT_CONSTANT uint8_t ggml_ext_ditto5_codebook[16] = GGML_EXT_DITTO5_CODEBOOK;

// The unpack contract, slow definition: values of the codebook, not indices.
static inline void ggml_ext_unpack_ditto5(const block_ditto5 * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        const int g = j/32, low = x->ql[64*(g%4/2) + 32*(g/4) + j%32] >> 4*(g%2) & 15;
        u->q[j] = (int8_t) (ggml_ext_ditto5_codebook[low] ^ (x->qh[j%32] >> g & 1 ? 127 : 0));
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = DITTO5_OFFSET;
}

// Its inverse: packs 256 levels 0..31 in ascending order of their values.
static inline void ggml_ext_pack_ditto5(const uint8_t level[QK_K], ggml_half d, block_ditto5 * x) {
    memset(x, 0, sizeof(*x));
    x->d = d;
    for (int j = 0; j < QK_K; ++j) {
        const int g = j/32, low = level[j] < 16 ? 15 - level[j] : level[j] - 16;
        x->ql[64*(g%4/2) + 32*(g/4) + j%32] |= (uint8_t) (low << 4*(g%2));
        x->qh[j%32]                         |= (uint8_t) ((level[j] < 16) << g);
    }
}

// A row is valid when every d is finite: any index bits are.
static inline bool ggml_ext_validate_block_ditto5(const block_ditto5 * x) {
    return ggml_ext_half_is_finite(x->d);
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_ditto5(const float * src, block_ditto5 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
