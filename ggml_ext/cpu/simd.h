// SIMD primitives: simd/<instruction set>.h, chosen here. Kernels are written once over them.
//
//   u8x32            32 bytes, one code each
//   load, store, |   what they say
//   field<S>(a, m)   (a >> S) & m in each byte; a negative S shifts left. m must not ask for bits that S < 0 left empty.
//   look_up(t, i)    t[i] in each byte, t a table of eight int8, i in 0..7
//   dot_sum<...>     sum of products of codes with int8 activations, exact
//   f32_sum          float accumulator of a row
//
// and for the activations:
//
//   f32x8            8 floats; load, store, + and - of two, * a float
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
#elif defined(GGML_EXT_NEON)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif

} // namespace ggml_ext
