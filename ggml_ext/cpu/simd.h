// SIMD primitives: simd/<instruction set>.h, chosen here. Kernels are written once over them.
//
//   u8x32            32 bytes, one code each
//   load, store, |, ^, +   what they say, + of bytes that stay below 256
//   load8x4(p, q, r, s)    eight bytes from each of four places
//   load_behind(first, p)  `first`, then 31 bytes from p on; the byte at p - 1 is read too
//   shift_lanes8(a, first) each byte one place up in its eight, the first of each eight from `first`, whose other bytes are zero, as
//                    first_of_8(a) makes them
//   field<S>(a, m)   (a >> S) & m in each byte; a negative S shifts left. m must not ask for bits that S < 0 left empty.
//   multiply_add<A, B>(a)   A*a + B of 32 bytes, 15 bits each: u15x32
//   field<S>(c)      bits S .. S + 5 of each of 32 codes of 15 bits
//   look_up(t, i)    t[i] in each byte, t a table of bytes: of sixteen by load_table16(p), i in 0..15, or of eight by
//                    load_table(p, mask), i in 0..7
//   look_up_scales(t, i)    scales4: of each quarter of a block, one of the four bytes of t, by its two bits of i
//   dot_sum<...>     sum of products of codes with int8 activations, exact; total() is an i32_sum
//   scaled_dot_sum<...>     the same, each quarter of a block times its scale: quarter_scale<K>(s) of a scales4
//   i32_sum          partial sums in N_LANES lanes
//   f32_lanes        floats for these lanes, by spread(): one for all, one for each block of 64 (f32x4), or a block's scales4;
//                    *; lane_sums: the sums of a block's activations, in the lanes of the scales
//   f32_sum          float accumulator of a row: add(scale, sum, a, b) adds scale*(sum + a*b); total(), or quarters(), an f32x4
//
// A block of 256 is eight groups of 32 weights, and so are four blocks of 64, with eight bytes of each in a group. Kernels take
// group g and group g + 4 together:
//
//   u8x64            the codes of both, one register where the set has such: load64, join, |, ^, field, look_up as above
//   xor3(a, b, c)    a ^ (b ^ c)
//   funnel<S>(a, b)  (a >> 8 - S) | (b << S) of each byte
//   shifted<S>(a)    bits S .. S + 3 of each byte in its low nibble, S = 0 ... 4; the other bits can be any
//   trellis_values(t, i0, i1)   the code of types/trellis.h for indices in the low nibbles
//   dot_sum64<...>, scaled_dot_sum64<...>   as above, of u8x64 with 64 activations; quarter_dot_sum64<...>: with the blocks of 64 in
//                    lanes of their own
//   f32x4            four floats, one for each block of 64; load4, store4, *; e5m3_to_float of four bytes
//
// and for the activations:
//
//   f32x8            8 floats; load, store, +, - and * of two, * a float
//   butterfly<S>(a)  (u, v) -> (u + v, u - v) of the lanes i and i + S, S = 1, 2 or 4
//   magnitude_max    the largest |a|; as integers the bits of floats keep their order, and Inf and NaN are the largest
//   round_to_i8(a)   32 floats within +-127.5 to int8, to nearest, ties to even
//   sums_of_16(q, s) sums of the first and of the last 16 int8
//   sums_of_8        accumulator of vectors of int8: four sums, of each eight
//
// ggml_ext_cpu_isa() names the set that was compiled in; GGML_EXT_SCALAR asks for the portable one.
#pragma once

#include "../ggml-ext-base.h"

#if defined(GGML_EXT_SCALAR)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define GGML_EXT_AVX2
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define GGML_EXT_AVX512
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define GGML_EXT_NEON
#endif

namespace ggml_ext {

// Largest magnitude of an activation code of Q8_KR.
constexpr int ACT_MAX = 127;

#if defined(GGML_EXT_AVX2)
#include "simd/avx2.h"
#else
// The scales of a block's quarters as integers, for sets that multiply vectors by scalars.
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

template <int S> static inline u8x32 funnel(u8x32 before, u8x32 a) {
    return field<8 - S>(before, (1 << S) - 1) | field<-S>(a, (uint8_t) (0xff << S));
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
template <int S> static inline u8x64 funnel(u8x64 before, u8x64 a) {
    return {funnel<S>(before.lo, a.lo), funnel<S>(before.hi, a.hi)};
}
template <int S> static inline u8x64 shifted(u8x64 a)                 { return {shifted<S>(a.lo), shifted<S>(a.hi)}; }
static inline u8x64 look_up(table16 t, u8x64 i)                       { return {look_up(t, i.lo), look_up(t, i.hi)}; }

static inline u8x32 trellis_values(const ggml_ext_trellis_tables & t, u8x32 i0, u8x32 i1) {
    return look_up(load_table16(t.values[0]), field<0>(i0, 15)) + look_up(load_table16(t.values[1]), field<0>(i1, 15));
}
static inline u8x64 trellis_values(const ggml_ext_trellis_tables & t, u8x64 i0, u8x64 i1) {
    return {trellis_values(t, i0.lo, i1.lo), trellis_values(t, i0.hi, i1.hi)};
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
