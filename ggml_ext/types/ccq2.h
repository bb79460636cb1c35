// CCQ2: a convolutional code of four weights per byte, four group scales under one super scale. 66 bytes for 256 weights: 2.0625 bpw.
//
//   byte  0  1       2
//         d  scales  qs (64)
//
//   byte i of qs holds the weights j = 128*(i/32) + i%32 + 32*k, k = 0..3:
//     c    = 121*qs[i] + 1178            one of 256 15-bit codes
//     q[j] = c >> 9 - 3*k & 63           consecutive k share three bits
//     w[j] = d * m[scales >> 2*(j/64) & 3] * (q[j] - 32),   m = {5, 6, 8, 11},   d an E5M3 float (e5m3.h)
//
// CCQ, section 3.3: the (L, N, S) = (6, 4, 3) code and its code cluster. The paper stores alpha, beta and the super scale per output
// channel. A ggml row has no place for them, so alpha = 121 and beta = 1178 are constants and d belongs to the block.
// docs/results/encoders.md has the other choices of m.
#pragma once

#include "e5m3.h"

enum { CCQ2_ALPHA = 121, CCQ2_BETA = 1178 };
#define CCQ2_OFFSET 32.0f

typedef struct {
    uint8_t d;         // super scale
    uint8_t scales;    // indices into m; group 0 in the low bits
    uint8_t qs[QK_K/4];
} block_ccq2;
static_assert(sizeof(block_ccq2) == 1 + 1 + QK_K/4, "CCQ2 is 66 bytes");
static_assert(255*CCQ2_ALPHA + CCQ2_BETA < 1 << 15, "codes have 15 bits");

#define CCQ2_SCALES (11u << 24 | 8u << 16 | 6u << 8 | 5u)
static inline int ggml_ext_ccq2_scale(int index) {
    return CCQ2_SCALES >> 8*index & 255;
}

// The unpack contract, scalar reference.
static inline void ggml_ext_unpack_ccq2(const block_ccq2 * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        const int c = CCQ2_ALPHA*x->qs[32*(j/128) + j%32] + CCQ2_BETA;
        u->q[j] = (int8_t) (c >> (9 - 3*(j%128/32)) & 63);
    }
    for (int g = 0; g < 4; ++g) {
        u->scale[g] = ggml_ext_ccq2_scale(x->scales >> 2*g & 3);
    }
    u->d      = ggml_ext_e5m3_to_float(x->d);
    u->offset = CCQ2_OFFSET;
}

// Every d below 0xf8 is finite; all other bits are valid.
static inline bool ggml_ext_validate_block_ccq2(const block_ccq2 * x) {
    return x->d <= GGML_EXT_E5M3_MAX;
}

// See encode/encode.h.
void ggml_ext_encode_ccq2(const float * src, block_ccq2 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
