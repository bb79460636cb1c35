// SIMD primitives: simd/<instruction set>.h, chosen here. Kernels are written once over them.
//
//   u8x32            32 bytes, one code each
//   load, store, |, ^, +   what they say, + of bytes that stay below 256
//   shift_lanes(a, first)  each byte one place up, `first` in place 0
//   field<S>(a, m)   (a >> S) & m in each byte; a negative S shifts left. m must not ask for bits that S < 0 left empty.
//   multiply_add<A, B>(a)   A*a + B of 32 bytes, 15 bits each: u15x32
//   field<S>(c)      bits S .. S + 5 of each of 32 codes of 15 bits
//   look_up(t, i)    t[i] in each byte, t a table of bytes: of sixteen by load_table16(p), i in 0..15, or of eight by
//                    load_table(p, mask), i in 0..7
//   look_up_scales(t, i)    scales4: of each quarter of a block, one of the four bytes of t, by its two bits of i
//   dot_sum<...>     sum of products of codes with int8 activations, exact, as an i32_sum; scaled_dot_sum<...>: each
//                    quarter of a block times its scale
//   f32_sum          float accumulator of a row
//   activation_sum   sum of a block's activation codes, each group's times its scale
//
// and for the activations:
//
//   f32x8            8 floats; load, store, +, - and * of two, * a float
//   butterfly<S>(a)  (u, v) -> (u + v, u - v) of the lanes i and i + S, S = 1, 2 or 4
//   magnitude_max    the largest |a|; as integers the bits of floats keep their order, and Inf and NaN are the largest
//   round_to_i8(a)   32 floats within +-127.5 to int8, to nearest, ties to even
//   sums_of_16(q, s) sums of the first and of the last 16 int8
//
// ggml_ext_cpu_isa() names the set that was compiled in; GGML_EXT_SCALAR asks for the portable one.
#pragma once

#include "../ggml-ext-base.h"

#if defined(GGML_EXT_SCALAR)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define GGML_EXT_AVX2
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

template <int Q_MAX> struct scaled_dot_sum {
    scales4 scales;
    i32_sum acc = {};
    template <int K> void add(u8x32 q0, u8x32 q1, const int8_t * y) {
        dot_sum<Q_MAX, 2> sum;
        sum.add(q0, y);
        sum.add(q1, y + 32);
        acc = acc + sum.total()*scales.v[K];
    }
    i32_sum total() const { return acc; }
};
#endif

} // namespace ggml_ext
