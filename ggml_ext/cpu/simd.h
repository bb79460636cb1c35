// SIMD primitives: simd/<instruction set>.h, chosen here. Kernels are written once over them.
//
//   u8x32            32 bytes, one code each
//   load, store, |   what they say
//   field<S>(a, m)   (a >> S) & m in each byte; a negative S shifts left. m must not ask for bits that S < 0 left empty.
//   multiply_add<A, B>(a)   A*a + B of 32 bytes, 15 bits each: u15x32
//   field<S>(c)      bits S .. S + 5 of each of 32 codes of 15 bits
//   look_up(t, i)    t[i] in each byte, t a table of eight bytes, i in 0..7; load_table(p, mask) loads it
//   look_up_scales(t, i)    scales4: of each quarter of a block, one of the four bytes of t, by its two bits of i
//   dot_sum<...>     sum of products of codes with int8 activations, exact, as an i32_sum; scaled_dot_sum<...>: each
//                    quarter of a block times its scale
//   f32_sum          float accumulator of a row
//   activation_sum   sum of a block's activation codes, each group's times its scale
//
// ggml_ext_cpu_isa() names the set that was compiled in.
#pragma once

#include "../ggml-ext-base.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define GGML_EXT_AVX2
#endif

namespace ggml_ext {

// Largest magnitude of an activation code of Q8_KR.
constexpr int ACT_MAX = 127;

#if defined(GGML_EXT_AVX2)
#include "simd/avx2.h"
#else
#include "simd/portable.h"
#endif

} // namespace ggml_ext
