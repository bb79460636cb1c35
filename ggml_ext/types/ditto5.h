// DITTO5: 5-bit indices into one fixed codebook of 32 values, of weights rotated by R = H S (ggml-ext-rotation.h).
// 162 bytes for 256 weights: 5.0625 bpw.
//
//   byte  0  2          130
//         d  ql (128)   qh (32)
//
//   w = S H v,   v[j] = d * (q[j] - 63.5)
//   q[j] = C[low] ^ (high ? 127 : 0),   C the upper half of the codebook: GGML_EXT_DITTO5_CODEBOOK (codes.h)
//   low  = ql[64*(g%4/2) + 32*(g/4) + j%32] >> 4*(g%2) & 15,  g = j/32      one load of 64 bytes serves four groups of 32;
//   high = qh[j%32] >> g & 1                                                kernels process g and g + 4 together
//
// Ditto, section 3.2, has a codebook per matrix. Rotated weights are Gaussian in every matrix, so one codebook serves all, and blocks
// differ by their scale. It is symmetric (127 - q is the code of -v), so kernels look up half of it. See docs/results/variants.md.
#pragma once

#include "../ggml-ext-common.h"
#include "codes.h"

typedef struct {
    ggml_half d;       // scale of the codebook
    uint8_t   ql[128]; // low four bits of the indices
    uint8_t   qh[32];  // high bit, the sign
} block_ditto5;
#define DITTO5_OFFSET GGML_EXT_DITTO5_CODEBOOK_OFFSET
static_assert(sizeof(block_ditto5) == sizeof(ggml_half) + QK_K/2 + QK_K/8, "DITTO5 is 162 bytes");

GGML_EXT_CONSTANT uint8_t ggml_ext_ditto5_codebook[16] = GGML_EXT_DITTO5_CODEBOOK;

// The unpack contract, scalar reference. q holds codebook values, not indices.
static inline void ggml_ext_unpack_ditto5(const block_ditto5 * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        const int g = j/32, low = x->ql[64*(g%4/2) + 32*(g/4) + j%32] >> 4*(g%2) & 15;
        u->q[j] = (int8_t) (ggml_ext_ditto5_codebook[low] ^ (x->qh[j%32] >> g & 1 ? 127 : 0));
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = DITTO5_OFFSET;
}

// Pack levels 0..31, in ascending order of their values.
static inline void ggml_ext_pack_ditto5(const uint8_t level[QK_K], ggml_half d, block_ditto5 * x) {
    memset(x, 0, sizeof(*x));
    x->d = d;
    for (int j = 0; j < QK_K; ++j) {
        const int g = j/32, low = level[j] < 16 ? 15 - level[j] : level[j] - 16;
        x->ql[64*(g%4/2) + 32*(g/4) + j%32] |= (uint8_t) (low << 4*(g%2));
        x->qh[j%32]                         |= (uint8_t) ((level[j] < 16) << g);
    }
}

// Every finite d is valid, with any indices.
static inline bool ggml_ext_validate_block_ditto5(const block_ditto5 * x) {
    return ggml_ext_half_is_finite(x->d);
}

// See encode/encode.h.
void ggml_ext_encode_ditto5(const float * src, block_ditto5 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
