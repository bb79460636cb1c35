// Emulated intrinsics: those of AVX-512 (F, BW, VBMI, VNNI), AVX-VNNI and AMX that ggml_ext/cpu uses, as loops over lanes, so that their
// kernels run on any CPU with AVX2. Included in place of the compiler's <immintrin.h>. SIMD_HOST_AVX512, with SIMD_HOST_AMX or without,
// or SIMD_HOST_AVXVNNI selects the instruction set that the kernels see.
//
// Kernels are in namespace ggml_ext, where these functions hide the compiler's, so a missing one does not compile. The semantics are
// those of the Intel Intrinsics Guide; bits that it leaves undefined are UNDEFINED, so that kernels cannot rely on zeros. Vectors may
// have any size: check.cpp compares 32 bytes with AVX2 and 64 bytes with AVX-512.
#pragma once

// all headers that kernels include after this one, because the last line redefines a keyword
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include_next <immintrin.h>

#undef _mm512_setr_epi32 // some compilers define these as macros, for immediate operands
#undef _mm512_slli_epi16
#undef _mm512_srli_epi16
#undef _mm512_ternarylogic_epi64
#undef _mm512_inserti64x4
#undef _mm512_extracti64x4_epi64
#undef _mm512_extractf64x4_pd
#undef _mm256_mask_set1_epi8
#undef _mm256_dpbusd_epi32
#undef _mm256_dpbusd_avx_epi32
#undef _mm512_inserti32x4
#undef _tile_storeconfig
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud

namespace ggml_ext {

constexpr uint8_t UNDEFINED = 0xa5;

// A vector as an array of T.
template <typename T, typename V> struct lanes {
    static constexpr int n = sizeof(V)/sizeof(T);
    T lane[n];

    lanes() = default;
    lanes(V v)           { memcpy(lane, &v, sizeof(v)); }
    operator V() const   { V v; memcpy(&v, lane, sizeof(v)); return v; }
};

// A vector with f(i) in lane i.
template <typename T, typename V, typename F> static inline V make(F f) {
    lanes<T, V> r;
    for (int i = 0; i < r.n; ++i) { r.lane[i] = f(i); }
    return r;
}

// Truncate a vector, or extend it with bytes `fill`.
template <typename To, typename From> static inline To resize(From a, uint8_t fill) {
    To r;
    memset(&r, fill, sizeof(r));
    memcpy(&r, &a, sizeof(r) < sizeof(a) ? sizeof(r) : sizeof(a));
    return r;
}

// --- set, load, convert between vector types ---

static inline __m512i _mm512_setzero_si512()                 { return __m512i{}; }
static inline __m512  _mm512_setzero_ps()                    { return __m512{}; }
template <typename V = __m512i> static inline V _mm512_set1_epi8(char a)       { return make<char, V>([=](int) { return a; }); }
template <typename V = __m512i> static inline V _mm512_set1_epi64(long long a) { return make<long long, V>([=](int) { return a; }); }
template <typename V = __m512>  static inline V _mm512_set1_ps(float a)        { return make<float, V>([=](int) { return a; }); }
template <typename V> static inline V _mm256_mask_set1_epi8(V a, uint32_t mask, char byte) {
    const lanes<char, V> x = a;
    return make<char, V>([&](int i) { return mask >> i & 1 ? byte : x.lane[i]; });
}
static inline __m512i _mm512_set1_epi32(int a)               { return make<int, __m512i>([=](int) { return a; }); }
template <typename... T> static inline __m512i _mm512_setr_epi32(T... a) {
    static_assert(sizeof...(a) == 16, "one for each lane");
    const int values[] = {a...};
    return make<int, __m512i>([&](int i) { return values[i]; });
}

// templates: argument-dependent lookup would find the compiler's void * overload to be an equal match
template <typename T> static inline __m512i _mm512_loadu_si512(const T * p) {
    __m512i v;
    memcpy(&v, (const void *) p, sizeof(v));
    return v;
}
template <typename T> static inline __m512i _mm512_load_si512(const T * p) {
    if ((uintptr_t) p%sizeof(__m512i)) { __builtin_trap(); } // the instruction faults too
    return _mm512_loadu_si512(p);
}

template <typename T> static inline void _mm512_store_si512(T * p, __m512i v) {
    if ((uintptr_t) p%sizeof(__m512i)) { __builtin_trap(); }
    memcpy((void *) p, &v, sizeof(v));
}
static inline __m512 _mm512_load_ps(const float * p)         { return resize<__m512>(_mm512_load_si512(p), 0); }
static inline void   _mm512_store_ps(float * p, __m512 v)    { _mm512_store_si512(p, resize<__m512i>(v, 0)); }

static inline __m512i _mm512_castps_si512(__m512 a)       { return resize<__m512i>(a, 0); }
static inline __m512  _mm512_castsi512_ps(__m512i a)      { return resize<__m512>(a, 0); }
static inline __m512d _mm512_castps_pd(__m512 a)          { return resize<__m512d>(a, 0); }
static inline __m256i _mm512_castsi512_si256(__m512i a)   { return resize<__m256i>(a, 0); }
static inline __m256  _mm512_castps512_ps256(__m512 a)    { return resize<__m256>(a, 0); }
static inline __m512i _mm512_castsi256_si512(__m256i a)   { return resize<__m512i>(a, UNDEFINED); }
static inline __m512i _mm512_castsi128_si512(__m128i a)   { return resize<__m512i>(a, UNDEFINED); }
static inline __m512  _mm512_castps128_ps512(__m128 a)    { return resize<__m512>(a, UNDEFINED); }
static inline __m512i _mm512_zextsi256_si512(__m256i a)   { return resize<__m512i>(a, 0); }
static inline __m512  _mm512_zextps256_ps512(__m256 a)    { return resize<__m512>(a, 0); }

// --- move ---

static inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int imm) {
    memcpy((char *) &a + 32*(imm & 1), &b, sizeof(b));
    return a;
}
static inline __m512i _mm512_inserti32x4(__m512i a, __m128i b, int imm) {
    memcpy((char *) &a + 16*(imm & 3), &b, sizeof(b));
    return a;
}
static inline __m256i _mm512_extracti64x4_epi64(__m512i a, int imm) {
    __m256i half;
    memcpy(&half, (const char *) &a + 32*(imm & 1), sizeof(half));
    return half;
}
static inline __m256d _mm512_extractf64x4_pd(__m512d a, int imm) {
    return resize<__m256d>(_mm512_extracti64x4_epi64(resize<__m512i>(a, 0), imm), 0);
}
template <typename To, typename From> static inline To repeat(From a) {
    To r;
    for (size_t i = 0; i < sizeof(r); i += sizeof(a)) { memcpy((char *) &r + i, &a, sizeof(a)); }
    return r;
}
static inline __m512i _mm512_broadcast_i32x4(__m128i a) { return repeat<__m512i>(a); }
static inline __m512i _mm512_broadcast_i64x4(__m256i a) { return repeat<__m512i>(a); }

// a[index], the upper bits of an index ignored
template <typename T, typename I, typename V, typename VI> static inline V permute(VI index, V a) {
    const lanes<I, VI> idx = index;
    const lanes<T, V>  l  = a;
    return make<T, V>([&](int i) { return l.lane[idx.lane[i] & (l.n - 1)]; });
}
template <typename V> static inline V _mm512_permutexvar_epi8(V index, V a)   { return permute<uint8_t, uint8_t>(index, a); }
template <typename V> static inline V _mm512_maskz_permutexvar_epi8(uint64_t mask, V index, V a) {
    const lanes<char, V> x = _mm512_permutexvar_epi8(index, a);
    return make<char, V>([&](int i) { return mask >> i & 1 ? x.lane[i] : (char) 0; });
}
template <typename V> static inline V _mm512_permutexvar_epi64(V index, V a)  { return permute<uint64_t, uint64_t>(index, a); }
template <typename VI, typename V> static inline V _mm512_permutexvar_ps(VI index, V a) { return permute<float, uint32_t>(index, a); }

// a table of a followed by b
template <typename V> static inline V _mm512_permutex2var_epi8(V a, V index, V b) {
    const lanes<uint8_t, V> l = a, h = b, idx = index;
    return make<uint8_t, V>([&](int i) {
        const int k = idx.lane[i] & (l.n - 1);
        return idx.lane[i] & l.n ? h.lane[k] : l.lane[k];
    });
}

// per 16 bytes: the lanes of the first or the second half of a and b in turns
template <typename T, typename V> static inline V unpack(V a, V b, int half) {
    constexpr int n = 16/sizeof(T);
    const lanes<T, V> x = a, y = b;
    return make<T, V>([&](int i) {
        const int from = i/n*n + i%n/2 + half*n/2;
        return i%2 ? y.lane[from] : x.lane[from];
    });
}
template <typename V> static inline V _mm512_unpacklo_epi32(V a, V b) { return unpack<uint32_t>(a, b, 0); }
template <typename V> static inline V _mm512_unpackhi_epi32(V a, V b) { return unpack<uint32_t>(a, b, 1); }
template <typename V> static inline V _mm512_unpacklo_epi64(V a, V b) { return unpack<uint64_t>(a, b, 0); }
template <typename V> static inline V _mm512_unpackhi_epi64(V a, V b) { return unpack<uint64_t>(a, b, 1); }

// per 16 bytes; zero if the top bit of the index is set
template <typename V> static inline V _mm512_shuffle_epi8(V a, V index) {
    const lanes<uint8_t, V> l = a, idx = index;
    return make<uint8_t, V>([&](int i) { return idx.lane[i] & 128 ? (uint8_t) 0 : l.lane[i/16*16 + (idx.lane[i] & 15)]; });
}

// --- bits ---

template <typename V, typename F> static inline V bits(V a, V b, F f) {
    const lanes<uint64_t, V> x = a, y = b;
    return make<uint64_t, V>([&](int i) { return f(x.lane[i], y.lane[i]); });
}
template <typename V> static inline V _mm512_and_si512(V a, V b)    { return bits(a, b, [](uint64_t x, uint64_t y) { return x & y; }); }
template <typename V> static inline V _mm512_andnot_si512(V a, V b) { return bits(a, b, [](uint64_t x, uint64_t y) { return ~x & y; }); }
template <typename V> static inline V _mm512_or_si512(V a, V b)     { return bits(a, b, [](uint64_t x, uint64_t y) { return x | y; }); }
template <typename V> static inline V _mm512_xor_si512(V a, V b)    { return bits(a, b, [](uint64_t x, uint64_t y) { return x ^ y; }); }

// bit 4*a + 2*b + c of imm
template <typename V> static inline V _mm512_ternarylogic_epi64(V a, V b, V c, int imm) {
    const lanes<uint64_t, V> x = a, y = b, z = c;
    return make<uint64_t, V>([&](int i) {
        uint64_t r = 0;
        for (int k = 0; k < 64; ++k) {
            const int bit = (int) (4*(x.lane[i] >> k & 1) + 2*(y.lane[i] >> k & 1) + (z.lane[i] >> k & 1));
            r |= (uint64_t) (imm >> bit & 1) << k;
        }
        return r;
    });
}

// zero for counts above 15
template <typename V> static inline V _mm512_srlv_epi16(V a, V count) {
    const lanes<uint16_t, V> x = a, n = count;
    return make<uint16_t, V>([&](int i) { return (uint16_t) (n.lane[i] > 15 ? 0 : x.lane[i] >> n.lane[i]); });
}
template <typename V> static inline V _mm512_srli_epi16(V a, unsigned count) {
    const lanes<uint16_t, V> x = a;
    return make<uint16_t, V>([&](int i) { return (uint16_t) (count > 15 ? 0 : x.lane[i] >> count); });
}
template <typename V> static inline V _mm512_slli_epi16(V a, unsigned count) {
    const lanes<uint16_t, V> x = a;
    return make<uint16_t, V>([&](int i) { return (uint16_t) (count > 15 ? 0 : x.lane[i] << count); });
}

// --- arithmetic ---

template <typename V> static inline V _mm512_add_epi8(V a, V b) {
    const lanes<uint8_t, V> x = a, y = b;
    return make<uint8_t, V>([&](int i) { return (uint8_t) (x.lane[i] + y.lane[i]); });
}
template <typename V> static inline V _mm512_add_epi32(V a, V b) {
    const lanes<uint32_t, V> x = a, y = b;
    return make<uint32_t, V>([&](int i) { return x.lane[i] + y.lane[i]; });
}

// sums of two adjacent products
template <typename V> static inline V _mm512_madd_epi16(V a, V b) {
    const lanes<int16_t, V> x = a, y = b;
    return make<uint32_t, V>([&](int i) {
        return (uint32_t) (x.lane[2*i]*y.lane[2*i]) + (uint32_t) (x.lane[2*i + 1]*y.lane[2*i + 1]);
    });
}
// the same for unsigned times signed bytes, saturated
template <typename V> static inline V _mm512_maddubs_epi16(V a, V b) {
    const lanes<uint8_t, V> x = a;
    const lanes<int8_t, V>  y = b;
    return make<int16_t, V>([&](int i) {
        return (int16_t) std::clamp(x.lane[2*i]*y.lane[2*i] + x.lane[2*i + 1]*y.lane[2*i + 1], INT16_MIN, INT16_MAX);
    });
}
// sums of four products of unsigned and signed bytes, added to sum, not saturated
template <typename V> static inline V _mm512_dpbusd_epi32(V sum, V a, V b) {
    const lanes<uint32_t, V> s = sum;
    const lanes<uint8_t, V>  x = a;
    const lanes<int8_t, V>   y = b;
    return make<uint32_t, V>([&](int i) {
        int products = 0;
        for (int k = 4*i; k < 4*i + 4; ++k) { products += x.lane[k]*y.lane[k]; }
        return s.lane[i] + (uint32_t) products;
    });
}
// sums of two products, added to sum, not saturated
template <typename V> static inline V _mm512_dpwssd_epi32(V sum, V a, V b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
static inline __m256i _mm256_dpbusd_epi32(__m256i sum, __m256i a, __m256i b)     { return _mm512_dpbusd_epi32(sum, a, b); }
static inline __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) { return _mm512_dpbusd_epi32(sum, a, b); }

template <typename V> static inline V _mm512_mul_ps(V a, V b) {
    const lanes<float, V> x = a, y = b;
    return make<float, V>([&](int i) { return x.lane[i]*y.lane[i]; });
}
// rounded once
template <typename V> static inline V _mm512_fmadd_ps(V a, V b, V c) {
    const lanes<float, V> x = a, y = b, z = c;
    return make<float, V>([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}
template <typename V> static inline V _mm512_fmsub_ps(V a, V b, V c) {
    const lanes<float, V> x = a, y = b, z = c;
    return make<float, V>([&](int i) { return std::fma(x.lane[i], y.lane[i], -z.lane[i]); });
}
template <typename V> static inline V _mm512_fnmadd_ps(V a, V b, V c) {
    const lanes<float, V> x = a, y = b, z = c;
    return make<float, V>([&](int i) { return std::fma(-x.lane[i], y.lane[i], z.lane[i]); });
}
template <typename V = __m512, typename VI> static inline V _mm512_cvtepi32_ps(VI a) {
    const lanes<int32_t, VI> x = a;
    return make<float, V>([&](int i) { return (float) x.lane[i]; });
}

// --- AMX: eight tiles of 16 rows of 64 bytes, which is how kernels configure them ---

struct tile { uint8_t row[16][64]; };
static tile & tile_register(int i) {
    static thread_local tile tiles[8];
    return tiles[i];
}
static inline void _tile_storeconfig(void * config) { memset(config, 0, 64); }
static inline void _tile_loadconfig(const void *) {}
static inline void _tile_zero(int i) { tile_register(i) = tile{}; }
static inline void _tile_loadd(int i, const void * p, size_t stride) {
    for (int r = 0; r < 16; ++r) { memcpy(tile_register(i).row[r], (const char *) p + r*stride, 64); }
}
static inline void _tile_stored(int i, void * p, size_t stride) {
    for (int r = 0; r < 16; ++r) { memcpy((char *) p + r*stride, tile_register(i).row[r], 64); }
}
// sums of signed times unsigned bytes: dword n of row m gets row m of a times dwords n of all rows of b
static inline void _tile_dpbsud(int out, int a, int b) {
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            int32_t sum;
            memcpy(&sum, tile_register(out).row[m] + 4*n, 4);
            for (int k = 0; k < 64; ++k) {
                sum += (int8_t) tile_register(a).row[m][k]*tile_register(b).row[k/4][4*n + k%4];
            }
            memcpy(tile_register(out).row[m] + 4*n, &sum, 4);
        }
    }
}

} // namespace ggml_ext

#if defined(SIMD_HOST_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0 // Linux grants the tiles
#endif
#if defined(SIMD_HOST_AVX512)
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512VBMI__ 1
#define __AVX512VNNI__ 1
#elif defined(SIMD_HOST_AVXVNNI)
#define __AVXVNNI__ 1
#endif

// Kernels use asm to keep vectors of 64 bytes in registers, which do not exist here.
#define __asm__(...)
