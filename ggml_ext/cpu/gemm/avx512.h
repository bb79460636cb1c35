// The GEMM with AVX-512 VNNI. Included by gemm.h.
#pragma once

namespace ggml_ext {

// Dwords 4*part to 4*part + 3 of rows r, r + 4, r + 8 and r + 12. Inserting from memory spares the one port that shuffles.
static inline __m512i load_four_rows(const uint8_t (&codes)[16][64], int r, int part) {
    const auto quarter = [&](int row) { return _mm_load_si128((const __m128i *) codes[row] + part); };
    __m512i v = _mm512_castsi128_si512(quarter(r));
    v = _mm512_inserti32x4(v, quarter(r + 4), 1);
    v = _mm512_inserti32x4(v, quarter(r + 8), 2);
    return _mm512_inserti32x4(v, quarter(r + 12), 3);
}

template <typename F> static inline void transpose16(const uint8_t (&codes)[16][64], F at) {
    for (int part = 0; part < 4; ++part) {
        const __m512i r0 = load_four_rows(codes, 0, part), r1 = load_four_rows(codes, 1, part);
        const __m512i r2 = load_four_rows(codes, 2, part), r3 = load_four_rows(codes, 3, part);
        const __m512i lo01 = _mm512_unpacklo_epi32(r0, r1), hi01 = _mm512_unpackhi_epi32(r0, r1);
        const __m512i lo23 = _mm512_unpacklo_epi32(r2, r3), hi23 = _mm512_unpackhi_epi32(r2, r3);
        _mm512_store_si512(at(4*part),     _mm512_unpacklo_epi64(lo01, lo23));
        _mm512_store_si512(at(4*part + 1), _mm512_unpackhi_epi64(lo01, lo23));
        _mm512_store_si512(at(4*part + 2), _mm512_unpacklo_epi64(hi01, hi23));
        _mm512_store_si512(at(4*part + 3), _mm512_unpackhi_epi64(hi01, hi23));
    }
}

// Add the products of codes with four activations of a column. Without keep(), GCC 12 spills the sums.
static inline void add_dot4(__m512i (&acc)[2], __m512i q0, __m512i q1, __m512i y) {
    acc[0] = keep(_mm512_dpbusd_epi32(acc[0], q0, y));
    acc[1] = keep(_mm512_dpbusd_epi32(acc[1], q1, y));
}

// Add the scaled products of 16 rows and a column: sums[s*stride] are those of the codes under scale s.
template <int S, bool OFFSETS>
static inline void add_scaled(const weight_panel & w, int r, const __m512i * sums, int stride, const column_panel & y, int c, float * products) {
    const __m512 column_d = _mm512_set1_ps(y.d[c]);
    __m512 total = _mm512_load_ps(products);
    for (int s = 0; s < S; ++s) {
        const __m512 column_sum = _mm512_set1_ps(y.sums[s*y.stride + c]), sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + s*stride));
        const __m512 x = OFFSETS ? _mm512_fnmadd_ps(_mm512_load_ps(w.offset + r), column_sum, _mm512_mul_ps(sum, column_d))
                                 : _mm512_fmsub_ps(sum, column_d, column_sum);
        total = _mm512_fmadd_ps(x, _mm512_load_ps(w.d[s] + r), total);
    }
    _mm512_store_ps(products, total);
}

// The sums of the codes under scale s.
template <int S, int C> static inline void multiply_codes(const weight_panel & w, const int8_t * codes, int s, __m512i (&sums)[C][2]) {
    __m512i acc[C][2];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) { acc[c][0] = acc[c][1] = _mm512_setzero_si512(); }
    codes += QK_K/S*s;
    for (int k = QK_K/4/S*s; k < QK_K/4/S*(s + 1); ++k, codes += 4) {
        const __m512i q0 = _mm512_load_si512(w.codes[k]), q1 = _mm512_load_si512(w.codes[k][16]);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            int32_t four;
            memcpy(&four, codes + QK_K*c, 4);
            add_dot4(acc[c], q0, q1, _mm512_set1_epi32(four));
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
    __m512i sums[S][C][2];
    for (int s = 0; s < S; ++s) { multiply_codes<S>(w, y.codes, s, sums[s]); }
    for (int c = 0; c < C; ++c) {
        add_scaled<S, OFFSETS>(w, 0, &sums[0][c][0], 2*C, y, c, products + PANEL_ROWS*c);
        add_scaled<S, OFFSETS>(w, 16, &sums[0][c][1], 2*C, y, c, products + PANEL_ROWS*c + 16);
    }
}

constexpr int COLUMNS_PER_PASS = 12; // the sums of 32 rows fill 24 registers

#ifdef GGML_EXT_TESTS
// Multiply n times without memory; return the number of products.
static int64_t multiply_registers(int64_t n) {
    __m512i acc[12][2] = {}, q = keep(_mm512_set1_epi8(1));
    for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < 12; ++c) { add_dot4(acc[c], q, q, q); }
    }
    return n*12*2*64;
}
#endif

} // namespace ggml_ext
