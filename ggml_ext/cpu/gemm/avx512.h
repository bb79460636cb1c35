// The GEMM's vectors and transposition with AVX-512 VNNI. Included by gemm/x86.h.
#pragma once

namespace ggml_ext {

typedef __m512i i32_vector;
typedef __m512  f32_vector;

static inline i32_vector set_i32(int x)                                        { return _mm512_set1_epi32(x); }
static inline f32_vector set_f32(float x)                                      { return _mm512_set1_ps(x); }
static inline f32_vector to_f32(i32_vector a)                                  { return _mm512_cvtepi32_ps(a); }
static inline i32_vector load_i32(const void * p)                              { return _mm512_load_si512(p); }
static inline f32_vector load_f32(const float * p)                             { return _mm512_load_ps(p); }
static inline void       store_f32(float * p, f32_vector a)                    { _mm512_store_ps(p, a); }
static inline f32_vector mul(f32_vector a, f32_vector b)                       { return _mm512_mul_ps(a, b); }
static inline f32_vector mul_add(f32_vector a, f32_vector b, f32_vector c)     { return _mm512_fmadd_ps(a, b, c); }
static inline f32_vector mul_sub(f32_vector a, f32_vector b, f32_vector c)     { return _mm512_fmsub_ps(a, b, c); }
static inline f32_vector neg_mul_add(f32_vector a, f32_vector b, f32_vector c) { return _mm512_fnmadd_ps(a, b, c); }

// Add products of four codes and four activations. Without keep(), GCC 12 spills the sums.
static inline i32_vector add_dot4(i32_vector sum, i32_vector q, i32_vector y) { return keep(_mm512_dpbusd_epi32(sum, q, y)); }

constexpr int COLUMNS_PER_PASS = 12; // the sums of 32 rows fill 24 registers

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

} // namespace ggml_ext
