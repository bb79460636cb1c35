// The GEMM's vectors and transposition with AVX2, with VNNI if enabled. Included by gemm/x86.h.
#pragma once

namespace ggml_ext {

typedef __m256i i32_vector;
typedef __m256  f32_vector;

static inline i32_vector set_i32(int x)                                        { return _mm256_set1_epi32(x); }
static inline f32_vector set_f32(float x)                                      { return _mm256_set1_ps(x); }
static inline f32_vector to_f32(i32_vector a)                                  { return _mm256_cvtepi32_ps(a); }
static inline i32_vector load_i32(const void * p)                              { return _mm256_load_si256((const __m256i *) p); }
static inline f32_vector load_f32(const float * p)                             { return _mm256_load_ps(p); }
static inline void       store_f32(float * p, f32_vector a)                    { _mm256_store_ps(p, a); }
static inline f32_vector mul(f32_vector a, f32_vector b)                       { return _mm256_mul_ps(a, b); }
static inline f32_vector mul_add(f32_vector a, f32_vector b, f32_vector c)     { return _mm256_fmadd_ps(a, b, c); }
static inline f32_vector mul_sub(f32_vector a, f32_vector b, f32_vector c)     { return _mm256_fmsub_ps(a, b, c); }
static inline f32_vector neg_mul_add(f32_vector a, f32_vector b, f32_vector c) { return _mm256_fnmadd_ps(a, b, c); }

// Add products of four codes and four activations. Codes have seven bits, so that maddubs does not saturate. Without keep(), GCC 12
// spills the sums.
static inline i32_vector add_dot4(i32_vector sum, i32_vector q, i32_vector y) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return keep(_mm256_dpbusd_epi32(sum, q, y));
#elif defined(__AVXVNNI__)
    return keep(_mm256_dpbusd_avx_epi32(sum, q, y));
#else
    return keep(_mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(q, y), _mm256_set1_epi16(1))));
#endif
}

constexpr int COLUMNS_PER_PASS = 6; // the sums of 16 rows fill 12 registers

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

} // namespace ggml_ext
