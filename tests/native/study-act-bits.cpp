// GGML_EXT_ACT_BITS: round activations to fewer than 8 bits, to reproduce results of papers with 4 bits. llama.cpp's tiles, repacked weights
// and AMX keep 8 bits: for its own types, set GGML_CPU_TILED_MM=0.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "ggml-cpu.h"
#include "ggml-ext-act-prec.h"
#include "ggml-ext-common.h"
#include "ggml-ext-cpu.h"

namespace {

int study_bits() {
    static const int bits = [] {
        const char * text = getenv("GGML_EXT_ACT_BITS");
        if (text && (text[0] < '2' || text[0] > '7' || text[1])) {
            fprintf(stderr, "error: GGML_EXT_ACT_BITS=%s: needs a number of bits from 2 to 7, or to be unset for 8\n", text);
            exit(1);
        }
        return text ? text[0] - '0' : 0;
    }();
    return bits;
}

// Round the codes of one scale to multiples of their largest over 2^(bits-1) - 1. The multiples are rounded to integers, which adds 0.3 % to
// the error of 4 bits.
void round_codes(int8_t * q, int n, int stride, int run) {
    int largest = 0;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, std::abs(q[i/run*stride + i%run]));
    }
    const float step = largest/float((1 << (study_bits() - 1)) - 1);
    for (int i = 0; i < n && largest > 0; i++) {
        int8_t & code = q[i/run*stride + i%run];
        code = lroundf(lroundf(code/step)*step);
    }
}

const int GROUP = 128; // as in the papers; blocks of 64 and 32 have one scale each

void round_block(block_q8_K & y) {
    for (int i = 0; i < QK_K; i += GROUP) {
        round_codes(y.qs + i, GROUP, GROUP, GROUP);
    }
    for (int i = 0; i < QK_K; i++) {
        y.bsums[i/16] = (i%16 ? y.bsums[i/16] : 0) + y.qs[i];
    }
}

// Blocks of 8*L values in a group.
template <int L, class Block> void round_group(Block & y) {
    for (int b = 0; b < 32/L; b++) {
        round_codes(y.qs + L*b, 8*L, 32, L);
        y.sum[b] = 0;
        for (int i = 0; i < 8*L; i++) {
            y.sum[b] += y.qs[i/L*32 + L*b + i%L];
        }
    }
}
void round_block(block_q8_kr64 & y) { round_group<8>(y); }
void round_block(block_q8_kr32 & y) { round_group<4>(y); }

void round_block(block_q8_0 & y) {
    round_codes(y.qs, QK8_0, QK8_0, QK8_0);
}

// A conversion function per activation type, which rounds the result of the original one.
template <ggml_type TYPE> ggml_from_float_t original;

template <ggml_type TYPE, class Block, int BLOCK_SIZE> ggml_from_float_t rounding(ggml_from_float_t from_float) {
    original<TYPE> = from_float;
    return [](const float * x, void * y, int64_t n) {
        original<TYPE>(x, y, n);
        for (int64_t i = 0; i < (n + BLOCK_SIZE - 1)/BLOCK_SIZE; i++) {
            round_block(((Block *) y)[i]);
        }
    };
}

} // namespace

ggml_from_float_t ggml_ext_study_from_float(const ggml_tensor * dst, ggml_type type, ggml_from_float_t from_float) {
    if (study_bits() == 0 || !ggml_is_quantized(type) || dst->op_params[3] != GGML_PREC_UNDEFINED) {
        return from_float;
    }
    switch (type) {
        case GGML_TYPE_Q8_K:    return rounding<GGML_TYPE_Q8_K,    block_q8_K,    QK_K>(from_float);
        case GGML_TYPE_Q8_KR:   return rounding<GGML_TYPE_Q8_KR,   block_q8_K,    QK_K>(from_float);
        case GGML_TYPE_Q8_KR64: return rounding<GGML_TYPE_Q8_KR64, block_q8_kr64, QK_K>(from_float);
        case GGML_TYPE_Q8_KR32: return rounding<GGML_TYPE_Q8_KR32, block_q8_kr32, QK_K>(from_float);
        case GGML_TYPE_Q8_0:    return rounding<GGML_TYPE_Q8_0,    block_q8_0,    QK8_0>(from_float);
        default:
            fprintf(stderr, "error: GGML_EXT_ACT_BITS: activations of type %s cannot be rounded\n", ggml_type_name(type));
            exit(1);
    }
}
