// Compare the intrinsics of immintrin.h with the CPU's on random vectors and extremes: vectors of 64 bytes with AVX-512 if compiled
// for it, else vectors of 32 bytes with one or several AVX2 intrinsics. Prints those that differ and then exits with 1.
#include "immintrin.h"
#undef __asm__

#include <cstdio>
#include <map>
#include <random>
#include <string>

#if defined(__AVX512VBMI__)
using V = __m512i;
using F = __m512;
#define SAME(call, avx2) check(#call, ggml_ext::call, ::call)
#define SAME512(call)    check(#call, ggml_ext::call, ::call)
#else
using V = __m256i;
using F = __m256;
#define SAME(call, avx2) check(#call, ggml_ext::call, avx2)
#define SAME512(call)
#endif

static std::map<std::string, int> n_wrong;

template <typename A> static bool same_bits(A a, A b) { return !memcmp(&a, &b, sizeof(a)); }

template <typename R, typename S> static void check(const char * name, R emulated, S expected) {
    static_assert(sizeof(emulated) == sizeof(expected), "vectors of one size");
    n_wrong[name] += !same_bits(emulated, (R) expected);
}
// any two NaN are equal
static void check(const char * name, F emulated, F expected) {
    float x[sizeof(F)/sizeof(float)], y[sizeof(F)/sizeof(float)];
    memcpy(x, &emulated, sizeof(x));
    memcpy(y, &expected, sizeof(y));
    bool all = true;
    for (size_t i = 0; i < std::size(x); ++i) {
        all &= same_bits(x[i], y[i]) || (std::isnan(x[i]) && std::isnan(y[i]));
    }
    n_wrong[name] += !all;
}

static std::mt19937 rng(1);

// Random bytes, or random extremes, which give the largest products.
template <typename A> static A random_vector(bool extremes) {
    static const uint8_t large[] = {0, 1, 127, 128, 129, 255};
    uint8_t bytes[sizeof(A)];
    for (uint8_t & b : bytes) { b = extremes ? large[rng()%sizeof(large)] : (uint8_t) rng(); }
    A v;
    memcpy(&v, bytes, sizeof(v));
    return v;
}

#if !defined(__AVX512VBMI__)
static const V PLACE0 = _mm256_setr_epi64x(255, 0, 0, 0);
static V or_(V a, V b)            { return _mm256_or_si256(a, b); }
static V and_(V a, V b)           { return _mm256_and_si256(a, b); }
static V select(V mask, V a, V b) { return or_(and_(mask, a), _mm256_andnot_si256(mask, b)); }

// bytes of a, by the low five bits of an index
static V bytes_at(V index, V a) {
    const V low4 = and_(index, _mm256_set1_epi8(15));
    const V lo = _mm256_shuffle_epi8(_mm256_permute2x128_si256(a, a, 0x00), low4);
    const V hi = _mm256_shuffle_epi8(_mm256_permute2x128_si256(a, a, 0x11), low4);
    return _mm256_blendv_epi8(lo, hi, _mm256_slli_epi16(index, 3)); // moves bit 4 to the sign
}
static V qwords_at(V index, V a) {
    const V dword = _mm256_slli_epi64(and_(index, _mm256_set1_epi64x(3)), 1);
    return _mm256_permutevar8x32_epi32(a, or_(dword, _mm256_slli_epi64(_mm256_add_epi64(dword, _mm256_set1_epi64x(1)), 32)));
}
static V shift_right(V a, V count) {
    const V low = _mm256_set1_epi32(0xffff);
    return or_(_mm256_srlv_epi32(and_(a, low), and_(count, low)),
               _mm256_slli_epi32(_mm256_srlv_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(count, 16)), 16));
}
// products of the even and of the odd bytes, in 16 bits
static V dot4(V sum, V a, V b) {
    const V even = _mm256_madd_epi16(and_(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8))));
}
#endif

// 32 bytes on any CPU: no 512-bit form is used
static void check_256(__m256i a, char byte) {
    const __m256i place0 = _mm256_setr_epi64x(255, 0, 0, 0);
    check("_mm256_mask_set1_epi8(a, 1, byte)", ggml_ext::_mm256_mask_set1_epi8(a, 1u, byte), _mm256_blendv_epi8(a, _mm256_set1_epi8(byte), place0));
}

#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// tiles of random bytes, rows at a stride, multiplied and added
static void check_tiles() {
    alignas(64) uint8_t config[64] = {1}, a[16*80], b[16*64], sums[2][16*64];
    for (int i = 0; i < 8; ++i) { config[16 + 2*i] = 64; config[48 + i] = 16; }
    __asm__ volatile("ldtilecfg %0" :: "m"(config));
    for (int round = 0; round < 1000; ++round) {
        for (uint8_t & x : a) { x = (uint8_t) rng(); }
        for (uint8_t & x : b) { x = (uint8_t) rng(); }
        ggml_ext::_tile_zero(0); ggml_ext::_tile_loadd(1, a, 80); ggml_ext::_tile_loadd(2, b, 64);
        ggml_ext::_tile_dpbsud(0, 1, 2); ggml_ext::_tile_dpbsud(0, 2, 1); ggml_ext::_tile_stored(0, sums[0], 64);
        __asm__ volatile("tilezero %%tmm0\n tileloadd (%0,%1,1), %%tmm1\n tileloadd (%2,%3,1), %%tmm2\n tdpbsud %%tmm2, %%tmm1, %%tmm0\n"
                         "tdpbsud %%tmm1, %%tmm2, %%tmm0\n tilestored %%tmm0, (%4,%3,1)"
                         :: "r"(a), "r"((size_t) 80), "r"(b), "r"((size_t) 64), "r"(sums[1]) : "memory");
        n_wrong["tiles"] += memcmp(sums[0], sums[1], sizeof(sums[0])) != 0;
    }
    __asm__ volatile("tilerelease");
}
#endif

int main() {
#if defined(__AMX_INT8__) && defined(__linux__)
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
        check_tiles();
    }
#endif
    for (int round = 0; round < 20000; ++round) {
        const bool extremes = round%2;
        const V a = random_vector<V>(extremes), b = random_vector<V>(extremes), c = random_vector<V>(extremes);
        const F x = random_vector<F>(extremes), y = random_vector<F>(extremes), z = random_vector<F>(extremes);
        check_256(random_vector<__m256i>(extremes), (char) rng());
        const V count = ggml_ext::_mm512_and_si512(b, ggml_ext::_mm512_set1_epi64<V>(0x001f001f001f001f));
        SAME(_mm512_and_si512(a, b),                   _mm256_and_si256(a, b));
        SAME(_mm512_andnot_si512(a, b),                _mm256_andnot_si256(a, b));
        SAME(_mm512_or_si512(a, b),                    _mm256_or_si256(a, b));
        SAME(_mm512_xor_si512(a, b),                   _mm256_xor_si256(a, b));
        SAME(_mm512_ternarylogic_epi64(a, b, c, 0xca), select(a, b, c));
        SAME(_mm512_srli_epi16(a, 0),                  _mm256_srli_epi16(a, 0));
        SAME(_mm512_srli_epi16(a, 5),                  _mm256_srli_epi16(a, 5));
        SAME(_mm512_srli_epi16(a, 16),                 _mm256_srli_epi16(a, 16));
        SAME(_mm512_slli_epi16(a, 5),                  _mm256_slli_epi16(a, 5));
        SAME(_mm512_slli_epi16(a, 16),                 _mm256_slli_epi16(a, 16));
        SAME(_mm512_srlv_epi16(a, b),                  shift_right(a, b));
        SAME(_mm512_srlv_epi16(a, count),              shift_right(a, count));
        SAME(_mm512_shuffle_epi8(a, b),                _mm256_shuffle_epi8(a, b));
        SAME(_mm512_permutexvar_epi8(a, b),            bytes_at(a, b));
        SAME(_mm512_maskz_permutexvar_epi8(~1ull, a, b), _mm256_andnot_si256(PLACE0, bytes_at(a, b)));
        SAME(_mm512_permutexvar_epi64(a, b),           qwords_at(a, b));
        SAME(_mm512_permutexvar_ps(a, x),              _mm256_permutevar8x32_ps(x, a));
        SAME(_mm512_permutex2var_epi8(a, b, c),        _mm256_blendv_epi8(bytes_at(b, a), bytes_at(b, c), _mm256_slli_epi16(b, 2)));
        SAME(_mm512_add_epi8(a, b),                    _mm256_add_epi8(a, b));
        SAME(_mm512_add_epi32(a, b),                   _mm256_add_epi32(a, b));
        SAME(_mm512_madd_epi16(a, b),                  _mm256_madd_epi16(a, b));
        SAME(_mm512_maddubs_epi16(a, b),               _mm256_maddubs_epi16(a, b));
        SAME(_mm512_dpbusd_epi32(a, b, c),             dot4(a, b, c));
        SAME(_mm512_dpwssd_epi32(a, b, c),             _mm256_add_epi32(a, _mm256_madd_epi16(b, c)));
        SAME(_mm512_mul_ps(x, y),                      _mm256_mul_ps(x, y));
        SAME(_mm512_fmadd_ps(x, y, z),                 _mm256_fmadd_ps(x, y, z));
        SAME(_mm512_fmsub_ps(x, y, z),                 _mm256_fmsub_ps(x, y, z));
        SAME(_mm512_fnmadd_ps(x, y, z),                _mm256_fnmadd_ps(x, y, z));
        SAME(_mm512_unpacklo_epi32(a, b),              _mm256_unpacklo_epi32(a, b));
        SAME(_mm512_unpackhi_epi32(a, b),              _mm256_unpackhi_epi32(a, b));
        SAME(_mm512_unpacklo_epi64(a, b),              _mm256_unpacklo_epi64(a, b));
        SAME(_mm512_unpackhi_epi64(a, b),              _mm256_unpackhi_epi64(a, b));
#if defined(__AVX512VBMI__)
        const __m256i half = random_vector<__m256i>(extremes);
        const __m128i quarter = random_vector<__m128i>(extremes);
        SAME512(_mm512_cvtepi32_ps(a));
        SAME512(_mm512_ternarylogic_epi64(a, b, c, 0x1e));
        SAME512(_mm512_broadcast_i32x4(quarter));
        SAME512(_mm512_broadcast_i64x4(half));
        SAME512(_mm512_zextsi256_si512(half));
        SAME512(_mm512_inserti32x4(a, quarter, 0));
        SAME512(_mm512_inserti32x4(a, quarter, 3));
        SAME512(_mm512_inserti64x4(a, half, 0));
        SAME512(_mm512_inserti64x4(a, half, 1));
        SAME512(_mm512_extracti64x4_epi64(a, 0));
        SAME512(_mm512_extracti64x4_epi64(a, 1));
#else
        check("_mm512_cvtepi32_ps(a)", ggml_ext::_mm512_cvtepi32_ps<F>(a), _mm256_cvtepi32_ps(a));
#endif
    }
    int n_bad = 0;
    for (const auto & [name, n] : n_wrong) {
        if (n) {
            printf("%s differs %d times\n", name.c_str(), n);
            ++n_bad;
        }
    }
    printf("%zu compared, %d differ\n", n_wrong.size(), n_bad);
    return n_bad > 0;
}
