// The GEMM on x86. A panel has two vectors of rows. Included by gemm.cpp.
#pragma once

#if defined(GGML_EXT_AVX512)
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace ggml_ext {

constexpr int VECTOR_ROWS = PANEL_ROWS/2;

// Add the scaled products of VECTOR_ROWS rows from r on and a column: sums[s*stride] are those of the codes under scale s.
template <int S, bool OFFSETS>
static inline void add_scaled(const weight_panel & w, int r, const i32_vector * sums, int stride, const column_panel & y, int c, float * products) {
    const f32_vector column_d = set_f32(y.d[c]);
    f32_vector total = load_f32(products);
    for (int s = 0; s < S; ++s) {
        const f32_vector column_sum = set_f32(y.sums[s*y.stride + c]), sum = to_f32(sums[s*stride]);
        const f32_vector x = OFFSETS ? neg_mul_add(load_f32(w.offset + r), column_sum, mul(sum, column_d)) : mul_sub(sum, column_d, column_sum);
        total = mul_add(x, load_f32(w.d[s] + r), total);
    }
    store_f32(products, total);
}

// The sums of the codes under scale s.
template <int S, int C> static inline void multiply_codes(const weight_panel & w, const int8_t * codes, int s, i32_vector (&sums)[C][2]) {
    i32_vector acc[C][2];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) { acc[c][0] = acc[c][1] = set_i32(0); }
    codes += QK_K/S*s;
    for (int k = QK_K/4/S*s; k < QK_K/4/S*(s + 1); ++k, codes += 4) {
        const i32_vector q0 = load_i32(w.codes[k]), q1 = load_i32(w.codes[k][VECTOR_ROWS]);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            int32_t four;
            memcpy(&four, codes + QK_K*c, 4);
            acc[c][0] = add_dot4(acc[c][0], q0, set_i32(four));
            acc[c][1] = add_dot4(acc[c][1], q1, set_i32(four));
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
        sums[c][0] = acc[c][0];
        sums[c][1] = acc[c][1];
    }
}

template <int S, bool OFFSETS, int C>
static void multiply_columns(const weight_panel & w, const column_panel & y, float * products) {
    i32_vector sums[S][C][2];
    for (int s = 0; s < S; ++s) { multiply_codes<S>(w, y.codes, s, sums[s]); }
    for (int c = 0; c < C; ++c) {
        for (int half = 0; half < 2; ++half) {
            add_scaled<S, OFFSETS>(w, half*VECTOR_ROWS, &sums[0][c][half], 2*C, y, c, products + PANEL_ROWS*c + half*VECTOR_ROWS);
        }
    }
}

#ifdef GGML_EXT_TESTS
// Multiply n times without memory; return the number of products.
static int64_t multiply_registers(int64_t n) {
    i32_vector acc[COLUMNS_PER_PASS][2];
    i32_vector q0 = set_i32(0x01010101), q1 = set_i32(0x02020202), y = q0;
    for (int c = 0; c < COLUMNS_PER_PASS; ++c) { acc[c][0] = acc[c][1] = set_i32(c); } // different, so that no two are computed as one
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS_PER_PASS; ++c) {
            y = keep(y); // without VNNI, equal products would be computed once
            acc[c][0] = add_dot4(acc[c][0], q0, y);
            acc[c][1] = add_dot4(acc[c][1], q1, y);
        }
    }
    i32_vector used = y;
    for (int c = 0; c < COLUMNS_PER_PASS; ++c) { used = add_dot4(add_dot4(used, acc[c][0], y), acc[c][1], y); }
    volatile int32_t first = 0; // so that the products are computed
    int32_t lane;
    memcpy(&lane, &used, sizeof(lane));
    first = lane;
    (void) first;
    return n*COLUMNS_PER_PASS*PANEL_ROWS*4;
}
#endif

} // namespace ggml_ext
