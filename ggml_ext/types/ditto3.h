// DITTO3: index into a codebook of eight values, one codebook a block.
//
//   w[j] = d * ((codebook[index[j]] & 127) - 64),   index[j] in 0..7 from ql and qh: bits3.h
//
//   byte  0  2              10            74       106
//         d  codebook (8)   ql (64)       qh (32)            106 bytes for 256 weights: 3.3125 bits a weight
//
// Source: Ditto, section 3.2: k-means of the weights, 3-bit indices. The paper keeps one codebook of float32 a matrix, from
// clusters of equal population improved by reassigning and averaging; ours lies in each block, as 7-bit integers times a
// half, and is the best for that block unless one for the whole tensor is given. Unsigned bytes below 128 are what byte
// multiply-adds take without saturating.
#pragma once

#include "bits3.h"

typedef struct {
    ggml_half d;           // scale of the codebook
    uint8_t   codebook[8]; // 64 more than the values; the top bits are not used
    uint8_t   ql[64];      // low two bits of the indices
    uint8_t   qh[32];      // high bit of the indices
} block_ditto3;
#define DITTO3_OFFSET 64
static_assert(sizeof(block_ditto3) == sizeof(ggml_half) + 8 + QK_K/4 + QK_K/8, "DITTO3 is 106 bytes");

// The unpack contract, slow definition: values of the codebook, not indices.
static inline void ggml_ext_unpack_ditto3(const block_ditto3 * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        u->q[j] = (int8_t) (x->codebook[ggml_ext_get_bits3(x->ql, x->qh, QK_K, j)] & 127);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = DITTO3_OFFSET;
}

// A row is valid when every d is finite: any codebook and any index bits are.
static inline bool ggml_ext_validate_block_ditto3(const block_ditto3 * x) {
    return ggml_ext_half_is_finite(x->d);
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_ditto3(const float * src, block_ditto3 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
