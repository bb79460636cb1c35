// CCQ2: four weights in eight bits by a convolutional code, four group scales under a super scale.
//
//   byte i of qs holds the weights j = 128*(i/32) + i%32 + 32*k, k = 0..3:
//     c    = 121*qs[i] + 1178            a 15-bit convolutional code, out of a cluster of 256
//     q[j] = c >> 9 - 3*k & 63           neighbours share three bits
//     w[j] = d * m[scales >> 2*(j/64) & 3] * (q[j] - 32),   m = {5, 6, 8, 11}
//     d    = super scale: e5m3.h
//
//   byte  0  1       2           66
//         d  scales  qs (64)             66 bytes for 256 weights: 2.0625 bits a weight
//
// Source: CCQ, the (L, N, S) = (6, 4, 3) code and the code cluster of section 3.3. There alpha, beta and a super scale
// belong to an output channel, which a row of ggml cannot hold: alpha = 121 and beta = 1178 are constants, and d lies in
// the block. scripts/studies/ccq2_study.py repeats the searches: over alpha and beta, relative squared error 0.1089 of Gaussian
// vectors under one scale, 0.1667 at the full range (alpha = 128.5); over the split of the 16 bits of scale information:
//
//                                        Gaussian  Student t, 4 d.o.f.  real weights (all-MiniLM-L6-v2)
//   half, no group scales                0.1084    0.1961               0.1276
//   E5M3 + 4x2 bits, m = {5, 6, 7, 8}    0.1042    0.1792               0.1204
//   E5M3 + 4x2 bits, m = {5, 6, 8, 11}   0.1046    0.1742               0.1201   <- kept
//   E5M3 + 4x2 bits, m = {2, 3, 4, 6}    0.1053    0.1716               0.1204
//   E4 + 4x3 bits, m = {4, 5, ... 11}    0.1046    0.1742               0.1199   half the range of magnitudes
//   free group scales                    0.1036    0.1722               0.1191
// Steps of w go from 1e-6, weights up to 8e4.
#pragma once

#include "e5m3.h"

enum { CCQ2_ALPHA = 121, CCQ2_BETA = 1178 };
#define CCQ2_OFFSET 32.0f

typedef struct {
    uint8_t d;         // super scale
    uint8_t scales;    // four indices into the group scales, the first group's in the low bits
    uint8_t qs[QK_K/4];
} block_ccq2;
static_assert(sizeof(block_ccq2) == 1 + 1 + QK_K/4, "CCQ2 is 66 bytes");
static_assert(255*CCQ2_ALPHA + CCQ2_BETA < 1 << 15, "codes have 15 bits");

#define CCQ2_SCALES (11u << 24 | 8u << 16 | 6u << 8 | 5u)
static inline int ggml_ext_ccq2_scale(int index) {
    return CCQ2_SCALES >> 8*index & 255;
}

// The unpack contract, slow definition.
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

// A row is valid when every d is finite, that is below 0xf8: any other bits are.
static inline bool ggml_ext_validate_block_ccq2(const block_ccq2 * x) {
    return x->d <= GGML_EXT_E5M3_MAX;
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_ccq2(const float * src, block_ccq2 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
