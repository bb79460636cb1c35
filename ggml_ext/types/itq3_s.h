// ITQ3_S: 3-bit codes with scale and zero point, of weights rotated by R = H S (ggml-ext-rotation.h).
// 100 bytes for 256 weights: 3.125 bpw.
//
//   byte  0  2   4            68
//         d  z   ql (64)      qh (32)
//
//   w = S H v,   v[j] = d * (q[j] - z),   q[j] in 0..7 from ql and qh (bits3.h)
//
// ITQ3_S, "Interleaved Ternary Quantization - Specialized": rotation, blocks of 256, d and z. The paper's ternary codes use three of
// the eight values. Its packing formula does not fit 96 bytes, so the bit layout here differs.
#pragma once

#include "bits3.h"

typedef struct {
    ggml_half d;      // scale
    ggml_half z;      // zero point in units of d: near 3.5 with eight levels, near 1 with three
    uint8_t   ql[64]; // low two bits of the codes
    uint8_t   qh[32]; // high bit of the codes
} block_itq3_s;
static_assert(sizeof(block_itq3_s) == 2*sizeof(ggml_half) + QK_K/4 + QK_K/8, "ITQ3_S is 100 bytes");

// The unpack contract, scalar reference.
static inline void ggml_ext_unpack_itq3_s(const block_itq3_s * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        u->q[j] = (int8_t) ggml_ext_get_bits3(x->ql, x->qh, QK_K, j);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = ggml_ext_half_to_float(x->z);
}

// Pack 256 codes 0..7.
static inline void ggml_ext_pack_itq3_s(const uint8_t q[QK_K], ggml_half d, ggml_half z, block_itq3_s * x) {
    x->d = d;
    x->z = z;
    ggml_ext_pack_bits3(q, QK_K, x->ql, x->qh);
}

// Every finite d and z is valid, with any codes.
static inline bool ggml_ext_validate_block_itq3_s(const block_itq3_s * x) {
    return ggml_ext_half_is_finite(x->d) && ggml_ext_half_is_finite(x->z);
}

// See encode/encode.h.
void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
