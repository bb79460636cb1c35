// Rotation fused into the 8-bit quantisation of an activation row: the one pass over the activations that every
// rotated weight type needs. Bit-equal to ggml_ext_quantize_row_q8_kr_ref.
#include "ggml-ext-cpu.h"
#include "simd.h"

#if defined(GGML_EXT_AVX2)

// Butterfly inside a register: swapped + (x with the second of each pair negated) = (u + v, u - v), the same two
// additions as the reference.
template <int STRIDE> static inline __m256 butterfly(__m256 x) {
    const __m256i neg = STRIDE == 1 ? _mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN)
                      : STRIDE == 2 ? _mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN)
                                    : _mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN);
    const __m256 swapped = STRIDE == 1 ? _mm256_permute_ps(x, 0xB1)
                         : STRIDE == 2 ? _mm256_permute_ps(x, 0x4E)
                                       : _mm256_permute2f128_ps(x, x, 1);
    return _mm256_add_ps(swapped, _mm256_xor_ps(x, _mm256_castsi256_ps(neg)));
}

// One stage across N registers, r[i] paired with r[i + stride].
template <int N> static inline void butterflies(__m256 (&r)[N], int stride) {
    for (int i = 0; i < N; i += 2*stride) {
        for (int j = i; j < i + stride; ++j) {
            const __m256 u = r[j], v = r[j + stride];
            r[j]          = _mm256_add_ps(u, v);
            r[j + stride] = _mm256_sub_ps(u, v);
        }
    }
}

// v = H x in two passes, 8 registers (strides 1 to 32) and 4 registers (64 and 128), so that nothing spills.
// Returns the eight-lane maximum of the bits of |v|: as integers floats keep their order, and Inf and NaN are the largest.
static inline __m256i rotate(const float * x, float * v) {
    for (int i = 0; i < QK_K; i += 64) {
        __m256 r[8];
        for (int k = 0; k < 8; ++k) {
            r[k] = butterfly<4>(butterfly<2>(butterfly<1>(_mm256_loadu_ps(x + i + 8*k))));
        }
        butterflies(r, 1);
        butterflies(r, 2);
        butterflies(r, 4);
        for (int k = 0; k < 8; ++k) {
            _mm256_store_ps(v + i + 8*k, r[k]);
        }
    }
    const __m256  norm = _mm256_set1_ps(1.0f/16);
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
    __m256i amax = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += 8) {
        __m256 r[4];
        for (int k = 0; k < 4; ++k) {
            r[k] = _mm256_load_ps(v + i + 64*k);
        }
        butterflies(r, 1);
        butterflies(r, 2);
        for (int k = 0; k < 4; ++k) {
            r[k] = _mm256_mul_ps(r[k], norm);
            amax = _mm256_max_epu32(amax, _mm256_and_si256(_mm256_castps_si256(r[k]), magnitude));
            _mm256_store_ps(v + i + 64*k, r[k]);
        }
    }
    return amax;
}

static inline float reduce_max(__m256i a) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

void ggml_ext_quantize_row_q8_kr(const float * x, void * vy, int64_t n) {
    assert(n % QK_K == 0);
    block_q8_K * y = (block_q8_K *) vy;
    for (int64_t ib = 0; ib < n/QK_K; ++ib, x += QK_K) {
        alignas(32) float v[QK_K];
        float factor;
        if (!ggml_ext_begin_q8_kr(&y[ib], reduce_max(rotate(x, v)), &factor)) {
            continue;
        }
        const __m256 inv_d = _mm256_set1_ps(factor);
        for (int g = 0; g < QK_K/32; ++g) {
            __m256i c[4];
            for (int k = 0; k < 4; ++k) {
                c[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(v + 32*g + 8*k), inv_d));
            }
            // packs work in 128-bit lanes: the permutation puts the 32 codes back in order
            const __m256i p01 = _mm256_packs_epi32(c[0], c[1]), p23 = _mm256_packs_epi32(c[2], c[3]);
            const __m256i q   = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(p01, p23),
                                                            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            _mm256_storeu_si256((__m256i *) (y[ib].qs + 32*g), q);

            // sums of the first and of the last 16 codes
            const __m256i s = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8((char) 0x80)), _mm256_setzero_si256());
            y[ib].bsums[2*g + 0] = (int16_t) (_mm256_extract_epi64(s, 0) + _mm256_extract_epi64(s, 1) - 16*128);
            y[ib].bsums[2*g + 1] = (int16_t) (_mm256_extract_epi64(s, 2) + _mm256_extract_epi64(s, 3) - 16*128);
        }
    }
}

#else

void ggml_ext_quantize_row_q8_kr(const float * x, void * y, int64_t n) {
    ggml_ext_quantize_row_q8_kr_ref(x, y, n);
}

#endif
