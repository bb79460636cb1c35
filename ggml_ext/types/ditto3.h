// DITTO3: 3-bit indices into a codebook of eight values per block. 106 bytes for 256 weights: 3.3125 bpw.
//
//   byte  0  2              10            74
//         d  codebook (8)   ql (64)       qh (32)
//
//   w[j] = d * ((codebook[i[j]] & 127) - 64),   i[j] in 0..7 from ql and qh (bits3.h)
//
// Ditto, section 3.2: k-means of the weights, 3-bit indices. The paper has one float32 codebook per matrix. Here each block has its own,
// 7-bit integers times a half: unsigned bytes below 128 do not saturate in byte multiply-adds.
#pragma once

#include "bits3.h"

typedef struct {
    ggml_half d;           // scale of the codebook
    uint8_t   codebook[8]; // value + 64; the top bit is ignored
    uint8_t   ql[64];      // low two bits of the indices
    uint8_t   qh[32];      // high bit of the indices
} block_ditto3;
#define DITTO3_OFFSET 64
static_assert(sizeof(block_ditto3) == sizeof(ggml_half) + 8 + QK_K/4 + QK_K/8, "DITTO3 is 106 bytes");

// The unpack contract, scalar reference. q holds codebook values, not indices.
static inline void ggml_ext_unpack_ditto3(const block_ditto3 * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        u->q[j] = (int8_t) (x->codebook[ggml_ext_get_bits3(x->ql, x->qh, QK_K, j)] & 127);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = DITTO3_OFFSET;
}

// Every finite d is valid, with any codebook and indices.
static inline bool ggml_ext_validate_block_ditto3(const block_ditto3 * x) {
    return ggml_ext_half_is_finite(x->d);
}

// See encode/encode.h.
void ggml_ext_encode_ditto3(const float * src, block_ditto3 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
