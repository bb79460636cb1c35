// SIMD primitives for the kernels, one implementation per instruction set in simd/. GGML_EXT_SCALAR selects the portable one;
// ggml_ext_cpu_isa() names the one in use.
//
//   u8x32            32 bytes, one code each
//   load, store, |, ^, +   + requires sums below 256
//   load8x4(p, q, r, s)    eight bytes from each of four addresses
//   words8(w)              eight words
//   load_behind(first, p)  `first`, then 31 bytes from p; reads p[-1] too
//   shift_lanes<N>(a, first) shift each N = 8 or 4 bytes up by one; byte 0 comes from `first`, whose other bytes are zero (first_of<N>())
//   u8x16            16 bytes: load16(p), load16_behind(first, p), words4(w)
//   spread_nibbles(a, b)   the bytes a >> 4 | b << 4, b of each byte of two u8x16, in turn
//   field<S>(a, m)   (a >> S) & m in each byte; S < 0 shifts left, and then m must not select the bits that became empty
//   multiply_add<A, B>(a)   u15x32: A*a + B of 32 bytes, 15 bits each
//   field<S>(c)      bits S .. S + 5 of each code of a u15x32
//   look_up(t, i)    t[i] in each byte; t has sixteen bytes (load_table16(p), i in 0..15) or eight (load_table(p, mask), i in 0..7)
//   look_up_scales(t, i)    scales4: per quarter of a block, one of the four bytes of t, selected by two bits of i
//   dot_sum<...>     exact sum of products of codes and int8 activations; total() is an i32_sum
//   scaled_dot_sum<...>     the same, with a scale per quarter of a block: quarter_scale<K>(s) of a scales4
//   i32_sum          partial sums in N_LANES lanes
//   f32_lanes        floats for these lanes: spread() of one float, of one per block of 64 (f32x4) or of a scales4; *
//   lane_sums        sums of a block's activations, in the lanes of the scales
//   f32_sum          float accumulator of a row: add(scale, sum, a, b) adds scale*(sum + a*b); total(), or quarters() as f32x4
//
// 256 weights, one block or four blocks of 64, are eight groups of 32; a group has eight bytes of each block of 64, four of each of 32. Kernels process
// groups g and g + 4 together:
//
//   u8x64            the codes of both, in one register if the set has one: load64, join, |, ^, field, look_up
//   xor3(a, b, c)    a ^ (b ^ c)
//   funnel<S>(a, b)  (a >> 8 - S) | (b << S) in each byte
//   shifted<S>(a)    bits S .. S + 3 of each byte in its low nibble, S = 0 .. 4; the high nibble is undefined
//   trellis_values(t, i0, i1, first)   the trellis code (types/trellis.h) of indices in the low nibbles, from the tables first and first + 1
//   dot_sum64<...>, scaled_dot_sum64<...>   of u8x64 with 64 activations; quarter_dot_sum64<...>: separate lanes per block of 64
//   f32x4            four floats, one per block of 64: load4, store4, *, e5m3_to_float of four bytes
//
// For activations:
//
//   f32x8            8 floats: load, store, +, -, *, and * with a float
//   butterfly<S>(a)  (u, v) -> (u + v, u - v) of lanes i and i + S, S = 1, 2 or 4
//   magnitude_max    largest |a|, compared as integers, so that Inf and NaN are the largest
//   round_to_i8(a)   32 floats within +-127.5 to int8, to nearest, ties to even
//   sums_of_16(q, s) sums of the first and the last 16 int8
//   sums_of_8        accumulates eight vectors of int8 in four sums, one per eight bytes
#pragma once

#include "../ggml-ext-base.h"

#if defined(GGML_EXT_SCALAR)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define GGML_EXT_AVX2
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define GGML_EXT_AVX512
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define GGML_EXT_AMX
#endif
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define GGML_EXT_NEON
#endif

namespace ggml_ext {

// Largest magnitude of a Q8_KR code.
constexpr int ACT_MAX = 127;

#if defined(GGML_EXT_AVX2)
#include "simd/avx2.h"
#else
// Scales of a block's quarters, for sets that multiply a vector by a scalar.
struct scales4 { int v[4]; };

static inline scales4 look_up_scales(uint32_t table, uint8_t indices) {
    scales4 s;
    for (int k = 0; k < 4; ++k) { s.v[k] = table >> 8*(indices >> 2*k & 3) & 255; }
    return s;
}
#if defined(GGML_EXT_NEON)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif

template <int K> static inline int quarter_scale(scales4 s) { return s.v[K]; }

template <int Q_MAX> struct scaled_dot_sum {
    i32_sum acc = {};
    void add(u8x32 q0, u8x32 q1, int scale, const int8_t * y) {
        dot_sum<Q_MAX, 2> sum;
        sum.add(q0, y);
        sum.add(q1, y + 32);
        acc = acc + sum.total()*scale;
    }
    i32_sum total() const { return acc; }
};
#endif

template <int S> static inline u8x32 funnel(u8x32 previous, u8x32 a) {
    return field<8 - S>(previous, (1 << S) - 1) | field<-S>(a, (uint8_t) (0xff << S));
}

#if defined(GGML_EXT_AVX512)
#include "simd/avx512.h"
#else
struct u8x64 { u8x32 lo, hi; };

static inline u8x64 load64(const uint8_t * p)   { return {load(p), load(p + 32)}; }
static inline u8x64 join(u8x32 lo, u8x32 hi)    { return {lo, hi}; }
static inline u8x32 low_half(u8x64 a)           { return a.lo; }
static inline u8x32 high_half(u8x64 a)          { return a.hi; }
static inline u8x64 operator|(u8x64 a, u8x64 b) { return {a.lo | b.lo, a.hi | b.hi}; }
static inline u8x64 operator^(u8x64 a, u8x64 b) { return {a.lo ^ b.lo, a.hi ^ b.hi}; }
static inline u8x64 xor3(u8x64 a, u8x64 b, u8x64 c) { return a ^ (b ^ c); }
template <int S> static inline u8x64 field(u8x64 a, uint8_t mask)     { return {field<S>(a.lo, mask), field<S>(a.hi, mask)}; }
template <int S> static inline u8x64 funnel(u8x64 previous, u8x64 a) {
    return {funnel<S>(previous.lo, a.lo), funnel<S>(previous.hi, a.hi)};
}
template <int S> static inline u8x64 shifted(u8x64 a)                 { return {shifted<S>(a.lo), shifted<S>(a.hi)}; }
static inline u8x64 look_up(table16 t, u8x64 i)                       { return {look_up(t, i.lo), look_up(t, i.hi)}; }

static inline u8x32 trellis_values(const ggml_ext_trellis_tables & t, u8x32 i0, u8x32 i1, int first = 0) {
    return look_up(load_table16(t.values[first]), field<0>(i0, 15)) + look_up(load_table16(t.values[first + 1]), field<0>(i1, 15));
}
static inline u8x64 trellis_values(const ggml_ext_trellis_tables & t, u8x64 i0, u8x64 i1, int first = 0) {
    return {trellis_values(t, i0.lo, i1.lo, first), trellis_values(t, i0.hi, i1.hi, first)};
}

template <typename Sum> struct sum64 : Sum {
    void add(u8x64 q, const int8_t * y) {
        Sum::add(q.lo, y);
        Sum::add(q.hi, y + 32);
    }
};
template <int Q_MAX> struct scaled_dot_sum64 : scaled_dot_sum<Q_MAX> {
    template <typename S> void add(u8x64 q, S scale, const int8_t * y) { scaled_dot_sum<Q_MAX>::add(q.lo, q.hi, scale, y); }
};
template <int Q_MAX> using dot_sum64         = sum64<dot_sum<Q_MAX, 8>>;
template <int Q_MAX> using quarter_dot_sum64 = sum64<quarter_dot_sum<Q_MAX>>;
#endif

} // namespace ggml_ext
