// ITQ4_T: 4-bit trellis code on weights rotated by R = H S: signs and a Walsh-Hadamard transform.
//
//   w[0..255] = S H v,   v[j] = d * (q[j] - offset),   q[j] by the code of trellis.h, K = 4      (ggml-ext-rotation.h)
//
//   byte  0  1      2          130
//         d  start  ql (128)                  130 bytes for 256 weights: 4.0625 bits a weight
//
// Trellis-coded quantization: M. W. Marcellin, T. R. Fischer, IEEE Trans. Communications 38(1), 1990; of rotated weights:
// QTIP (A. Tseng et al., 2024). The code is ours. What two bytes hold beside the codes: a start state costs no pass of the
// encoder, where a circle of states would (and 3 % in error), and the three bits of mantissa of d cost less than they save.
#pragma once

#include "trellis.h"

typedef struct {
    uint8_t d;       // scale: e5m3.h
    uint8_t start;   // symbols before the first
    uint8_t ql[128]; // symbols, of two steps in a byte
} block_itq4_t;
static_assert(sizeof(block_itq4_t) == 1 + 1 + QK_K/2, "ITQ4_T is 130 bytes");

static const struct ggml_ext_trellis_tables ggml_ext_itq4_t_tables = GGML_EXT_ITQ4_T_TRELLIS_TABLES;

static inline void ggml_ext_unpack_itq4_t(const block_itq4_t * x, struct ggml_ext_unpacked * u) {
    ggml_ext_trellis_unpack(&ggml_ext_itq4_t_tables, 4, QK_K, x->d, x->start, x->ql, NULL, GGML_EXT_ITQ4_T_TRELLIS_OFFSET, u);
}

// A row is valid when every d is finite: any other bits are.
static inline bool ggml_ext_validate_block_itq4_t(const block_itq4_t * x) {
    return x->d <= GGML_EXT_E5M3_MAX;
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_itq4_t(const float * src, block_itq4_t * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                         const struct ggml_ext_quantize_params * params);
