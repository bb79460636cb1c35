// The GEMM with AVX2, with VNNI if enabled. Included by gemm.h.
#pragma once

namespace ggml_ext {

// Write dwords t to t + 7 of rows r to r + 7.
template <typename F> static inline void transpose8(const uint8_t (&codes)[16][64], int r, int t, F at) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) { a[i] = _mm256_load_si256((const __m256i *) (codes[r + i] + 4*t)); }
    for (int i = 0; i < 8; i += 2) {
        b[i]     = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i]     = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) { // a[i], a[i + 4]: dwords i and i + 4 of four rows each
        _mm256_store_si256((__m256i *) (at(t + i) + 4*r),     _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        _mm256_store_si256((__m256i *) (at(t + i + 4) + 4*r), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}

template <typename F> static inline void transpose16(const uint8_t (&codes)[16][64], F at) {
    for (int i = 0; i < 4; ++i) { transpose8(codes, i%2*8, i/2*8, at); }
}

// Add the products of codes with four activations of a column. Eight bits of activations and seven of codes do not saturate maddubs.
static inline void add_dot4(__m256i (&acc)[2], __m256i q0, __m256i q1, __m256i y) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    acc[0] = keep(_mm256_dpbusd_epi32(acc[0], q0, y));
    acc[1] = keep(_mm256_dpbusd_epi32(acc[1], q1, y));
#elif defined(__AVXVNNI__)
    acc[0] = keep(_mm256_dpbusd_avx_epi32(acc[0], q0, y));
    acc[1] = keep(_mm256_dpbusd_avx_epi32(acc[1], q1, y));
#else
    const __m256i ones = _mm256_set1_epi16(1);
    acc[0] = keep(_mm256_add_epi32(acc[0], _mm256_madd_epi16(_mm256_maddubs_epi16(q0, y), ones)));
    acc[1] = keep(_mm256_add_epi32(acc[1], _mm256_madd_epi16(_mm256_maddubs_epi16(q1, y), ones)));
#endif
}

// Add the scaled products of 8 rows and a column: sums[s*stride] are those of the codes under scale s.
template <int S, bool OFFSETS>
static inline void add_scaled(const weight_panel & w, int r, const __m256i * sums, int stride, const column_panel & y, int c, float * products) {
    const __m256 column_d = _mm256_set1_ps(y.d[c]);
    __m256 total = _mm256_load_ps(products);
    for (int s = 0; s < S; ++s) {
        const __m256 column_sum = _mm256_set1_ps(y.sums[s*y.stride + c]), sum = _mm256_cvtepi32_ps(sums[s*stride]);
        const __m256 x = OFFSETS ? _mm256_fnmadd_ps(_mm256_load_ps(w.offset + r), column_sum, _mm256_mul_ps(sum, column_d))
                                 : _mm256_fmsub_ps(sum, column_d, column_sum);
        total = _mm256_fmadd_ps(x, _mm256_load_ps(w.d[s] + r), total);
    }
    _mm256_store_ps(products, total);
}

// The sums of the codes under scale s.
template <int S, int C> static inline void multiply_codes(const weight_panel & w, const int8_t * codes, int s, __m256i (&sums)[C][2]) {
    __m256i acc[C][2];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) { acc[c][0] = acc[c][1] = _mm256_setzero_si256(); }
    codes += QK_K/S*s;
    for (int k = QK_K/4/S*s; k < QK_K/4/S*(s + 1); ++k, codes += 4) {
        const __m256i q0 = _mm256_load_si256((const __m256i *) w.codes[k]), q1 = _mm256_load_si256((const __m256i *) w.codes[k][8]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            int32_t four;
            memcpy(&four, codes + QK_K*c, 4);
            add_dot4(acc[c], q0, q1, _mm256_set1_epi32(four));
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        sums[c][0] = acc[c][0];
        sums[c][1] = acc[c][1];
    }
}

template <int S, bool OFFSETS, int C>
static void multiply_columns(const weight_panel & w, const column_panel & y, float * products) {
    __m256i sums[S][C][2];
    for (int s = 0; s < S; ++s) { multiply_codes<S>(w, y.codes, s, sums[s]); }
    for (int c = 0; c < C; ++c) {
        add_scaled<S, OFFSETS>(w, 0, &sums[0][c][0], 2*C, y, c, products + PANEL_ROWS*c);
        add_scaled<S, OFFSETS>(w, 8, &sums[0][c][1], 2*C, y, c, products + PANEL_ROWS*c + 8);
    }
}

constexpr int COLUMNS_PER_PASS = 6; // the sums of 16 rows fill 12 registers

#ifdef GGML_EXT_TESTS
// Multiply n times without memory; return the number of products.
static int64_t multiply_registers(int64_t n) {
    __m256i acc[6][2] = {}, q = keep(_mm256_set1_epi8(1));
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < 6; ++c) { add_dot4(acc[c], q, q, q); }
    }
    return n*6*2*32;
}
#endif

} // namespace ggml_ext
