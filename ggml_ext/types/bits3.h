// The 3-bit plane layout that ITQ3_S and DITTO3 share: codes 0..7 of 256 weights in 96 bytes.
//
//   low2 = ql[32*(j/128) + j%32] >> 2*((j%128)/32) & 3      one 32-byte load of ql serves four groups of 32 weights
//   high = qh[j%32] >> (j/32) & 1                           one 32-byte load of qh serves all eight groups
//   code = low2 | high << 2
#pragma once

#include "../ggml-ext-common.h"

static inline int ggml_ext_get_bits2(const uint8_t ql[64], int j) {
    return ql[32*(j/128) + j%32] >> 2*((j%128)/32) & 3;
}

static inline int ggml_ext_get_bits3(const uint8_t ql[64], const uint8_t qh[32], int j) {
    const int high = qh[j%32] >> (j/32) & 1;
    return ggml_ext_get_bits2(ql, j) | high << 2;
}

static inline void ggml_ext_pack_bits3(const uint8_t code[QK_K], uint8_t ql[64], uint8_t qh[32]) {
    memset(ql, 0, 64);
    memset(qh, 0, 32);
    for (int j = 0; j < QK_K; ++j) {
        ql[32*(j/128) + j%32] |= (uint8_t) ((code[j] & 3) << 2*((j%128)/32));
        qh[j%32]              |= (uint8_t) ((code[j] >> 2) << (j/32));
    }
}
