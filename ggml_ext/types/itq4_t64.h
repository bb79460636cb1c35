// ITQ4_T64: 4-bit trellis code on weights rotated by R = H S in blocks of 64, for rows of any multiple of 64.
//
//   w[0..63] = S H v,   v[j] = d * (q[j] - offset),   q[j] by ITQ4_T's code over 64 steps      (ggml-ext-rotation.h, trellis.h)
//
//   byte  0  1      2         34
//         d  start  ql (32)                  34 bytes for 64 weights: 4.25 bits a weight
//
// Source: as ITQ4_T. A path of 64 steps is bound to its start more than one of 256: without the start byte the error of a
// Gaussian is 0.0210 instead of 0.0156.
#pragma once

#include "itq4_t.h"

typedef struct {
    uint8_t d;      // scale: e5m3.h
    uint8_t start;  // symbols before the first
    uint8_t ql[32]; // symbols, of two steps in a byte
} block_itq4_t64;
static_assert(sizeof(block_itq4_t64) == 1 + 1 + 64/2, "ITQ4_T64 is 34 bytes");

static const struct ggml_ext_trellis_tables ggml_ext_itq4_t64_tables = GGML_EXT_ITQ4_T64_TRELLIS_TABLES;

static inline void ggml_ext_unpack_itq4_t64(const block_itq4_t64 * x, struct ggml_ext_unpacked * u) {
    ggml_ext_trellis_unpack(&ggml_ext_itq4_t64_tables, 4, 64, x->d, x->start, x->ql, NULL, GGML_EXT_ITQ4_T64_TRELLIS_OFFSET, u);
}

// A row is valid when every d is finite: any other bits are.
static inline bool ggml_ext_validate_block_itq4_t64(const block_itq4_t64 * x) {
    return x->d <= GGML_EXT_E5M3_MAX;
}

// Encodes rows of unrotated weights: encode/encode.h.
void ggml_ext_encode_itq4_t64(const float * src, block_itq4_t64 * dst, int64_t n_rows, int64_t row_blocks,
                              const float * importance, const struct ggml_ext_quantize_params * params);
