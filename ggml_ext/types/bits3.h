// Bit planes of the 3-bit types: n = 256, 64 or 32 codes 0..7 per block. Let L = n/8.
//
//   low2 = ql[L*(j/(4*L)) + j%L] >> 2*(j%(4*L)/L) & 3       one load of L bytes of ql serves four groups of L weights
//   high = qh[j%L] >> (j/L) & 1                             one load of L bytes of qh serves all eight groups
//   code = low2 | high << 2
#pragma once

#include "../ggml-ext-common.h"

static inline int ggml_ext_get_bits2(const uint8_t * ql, int n, int j) {
    const int lanes = n/8;
    return ql[lanes*(j/(4*lanes)) + j%lanes] >> 2*(j%(4*lanes)/lanes) & 3;
}

static inline int ggml_ext_get_bits3(const uint8_t * ql, const uint8_t * qh, int n, int j) {
    const int lanes = n/8;
    return ggml_ext_get_bits2(ql, n, j) | (qh[j%lanes] >> (j/lanes) & 1) << 2;
}

// Pack codes 0..7; with qh NULL, codes 0..3.
static inline void ggml_ext_pack_bits3(const uint8_t * code, int n, uint8_t * ql, uint8_t * qh) {
    const int lanes = n/8;
    memset(ql, 0, (size_t) n/4);
    if (qh) {
        memset(qh, 0, (size_t) n/8);
    }
    for (int j = 0; j < n; ++j) {
        ql[lanes*(j/(4*lanes)) + j%lanes] |= (uint8_t) ((code[j] & 3) << 2*(j%(4*lanes)/lanes));
        if (qh) {
            qh[j%lanes] |= (uint8_t) ((code[j] >> 2) << (j/lanes));
        }
    }
}
