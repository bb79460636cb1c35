// ITQ3_S: 3-bit codes on weights rotated by R = H S: signs and a Walsh-Hadamard transform.
//
//   w[0..255] = S H v,   v[j] = d * (q[j] - z),   q[j] in 0..7 from ql and qh: bits3.h      (ggml-ext-rotation.h)
//
//   byte  0  2   4            68       100
//         d  z   ql (64)      qh (32)                       100 bytes for 256 weights: 3.125 bits a weight
//
// Source: ITQ3_S, "Interleaved Ternary Quantization - Specialized": rotation, 256-wide block, d and z. The paper's
// ternary values use three of the eight codes; its packing formula does not fit 96 bytes, so the bit map is ours.
#pragma once

#include "bits3.h"

typedef struct {
    ggml_half d;      // scale of the block
    ggml_half z;      // zero point in units of d; near 3.5 with eight levels, near 1 with three
    uint8_t   ql[64]; // low two bits of the codes
    uint8_t   qh[32]; // high bit of the codes
} block_itq3_s;
static_assert(sizeof(block_itq3_s) == 2*sizeof(ggml_half) + QK_K/4 + QK_K/8, "ITQ3_S is 100 bytes");

// The unpack contract, slow definition: codes, scale and offset of one block.
static inline void ggml_ext_unpack_itq3_s(const block_itq3_s * x, struct ggml_ext_unpacked * u) {
    for (int j = 0; j < QK_K; ++j) {
        u->q[j] = (int8_t) ggml_ext_get_bits3(x->ql, x->qh, QK_K, j);
    }
    u->scale[0] = 1;
    u->d        = ggml_ext_half_to_float(x->d);
    u->offset   = ggml_ext_half_to_float(x->z);
}

// Its inverse: packs 256 codes in 0..7.
static inline void ggml_ext_pack_itq3_s(const uint8_t q[QK_K], ggml_half d, ggml_half z, block_itq3_s * x) {
    x->d = d;
    x->z = z;
    ggml_ext_pack_bits3(q, QK_K, x->ql, x->qh);
}

// A row is valid when every d and z is finite: any code bits are.
static inline bool ggml_ext_validate_block_itq3_s(const block_itq3_s * x) {
    return ggml_ext_half_is_finite(x->d) && ggml_ext_half_is_finite(x->z);
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_itq3_s(const float * src, block_itq3_s * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
