// Sums over tokens of outer products in BF16 with AVX512-BF16 (declared in ggml-ext.h).
#include "../ggml-ext.h"

// GCC does not align vectors on Windows' stack.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 12) && !defined(_WIN32)

#include <immintrin.h>

#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

enum {
    WIDTH      = 16,  // columns of a panel, which is stored as [pair of tokens][WIDTH][2]
    TILE_ROWS  = 8,   // rows of a tile; its sums stay in registers
    N_PANELS   = 3,   // panels across a tile
    PAIRS_ONCE = 256, // pairs of tokens per pass, so that a tile's panels stay in the L2 cache
};

bool ggml_ext_has_bf16_sums(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

BF16 static __m512i load_rounded(const float * x, int64_t n) {
    const __mmask16 mask = n < WIDTH ? (__mmask16) ((1 << n) - 1) : 0xffff;
    return _mm512_cvtepu16_epi32((__m256i) _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x)));
}

BF16 void ggml_ext_pack_bf16(const float * x, int64_t stride, int64_t n_tokens, int64_t n_columns, void * packed) {
    const int64_t n_pairs = (n_tokens + 1)/2;
    for (int64_t t = 0; t < n_tokens; t += 2) {
        for (int64_t j = 0; j < n_columns; j += WIDTH) {
            const float * first  = x + t*stride + j;
            const __m512i second = t + 1 < n_tokens ? load_rounded(first + stride, n_columns - j) : _mm512_setzero_si512();
            const __m512i pair   = _mm512_or_si512(load_rounded(first, n_columns - j), _mm512_slli_epi32(second, 16));
            _mm512_storeu_si512((char *) packed + (j*n_pairs + t/2*WIDTH)*sizeof(int32_t), pair);
        }
    }
}

BF16 void ggml_ext_pack_bf16_transposed(const float * x, int64_t stride, int64_t n_rows, int64_t n_columns, void * packed) {
    const int64_t n_pairs = (n_columns + 1)/2;
    int32_t       block[WIDTH][WIDTH]; // [row][pair]
    for (int64_t i = 0; i < n_rows; i += WIDTH) {
        int32_t * out = (int32_t *) packed + i*n_pairs;
        for (int64_t p = 0; p < n_pairs; p += WIDTH) {
            const int64_t   rest = n_columns - 2*p, n = n_pairs - p < WIDTH ? n_pairs - p : WIDTH;
            const __mmask32 mask = rest < 2*WIDTH ? (__mmask32) ((1u << rest) - 1) : 0xffffffff;
            for (int r = 0; r < WIDTH; ++r) {
                const __mmask32 used = i + r < n_rows ? mask : 0;
                const float *   src  = x + (i + r < n_rows ? i + r : i)*stride + 2*p;
                const __m512    low  = _mm512_maskz_loadu_ps((__mmask16) used, src);
                const __m512    high = _mm512_maskz_loadu_ps((__mmask16) (used >> WIDTH), src + WIDTH);
                _mm512_storeu_si512(block[r], (__m512i) _mm512_cvtne2ps_pbh(high, low));
            }
            for (int k = 0; k < n; ++k) {
                for (int r = 0; r < WIDTH; ++r) {
                    out[(p + k)*WIDTH + r] = block[r][k];
                }
            }
        }
    }
}

// Add the products of TILE_ROWS columns of `left` with `n` panels of `right`, over n_pairs pairs of tokens, to n_rows x n_columns sums.
BF16 static inline __attribute__((always_inline)) void add_tile(const int n, float * sums, int64_t stride, int64_t n_rows, int64_t n_columns,
                                                                const int32_t * left, const int32_t * right, int64_t panel_size, int64_t n_pairs) {
    __m512 sum[TILE_ROWS][N_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) {
#pragma GCC unroll 3
        for (int v = 0; v < n; ++v) {
            sum[r][v] = _mm512_setzero_ps();
        }
    }
    for (int64_t p = 0; p < n_pairs; ++p) {
        __m512bh y[N_PANELS];
#pragma GCC unroll 3
        for (int v = 0; v < n; ++v) {
            y[v] = (__m512bh) _mm512_loadu_si512(right + v*panel_size + p*WIDTH);
        }
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; ++r) {
            const __m512bh x = (__m512bh) _mm512_set1_epi32(left[p*WIDTH + r]);
#pragma GCC unroll 3
            for (int v = 0; v < n; ++v) {
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, y[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) {
        if (r >= n_rows) {
            break;
        }
#pragma GCC unroll 3
        for (int v = 0; v < n; ++v) {
            const int64_t   rest = n_columns - v*WIDTH;
            const __mmask16 mask = rest < WIDTH ? (__mmask16) ((1 << rest) - 1) : 0xffff;
            float *         out  = sums + r*stride + v*WIDTH;
            _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum[r][v]));
        }
    }
}

BF16 void ggml_ext_add_bf16(float * sums, int64_t n_columns, const void * left, const void * right, int64_t n_tokens, int64_t first_row,
                            int64_t end_row, int64_t first_column) {
    const int64_t n_pairs = (n_tokens + 1)/2, panel_size = n_pairs*WIDTH;
    for (int64_t j = first_column/WIDTH*WIDTH; j < n_columns; j += N_PANELS*WIDTH) {
        for (int64_t p = 0; p < n_pairs; p += PAIRS_ONCE) {
            const int64_t   n = n_pairs - p < PAIRS_ONCE ? n_pairs - p : PAIRS_ONCE;
            const int32_t * y = (const int32_t *) right + j*n_pairs + p*WIDTH;
            for (int64_t i = first_row; i < end_row; i += TILE_ROWS) {
                const int32_t * x    = (const int32_t *) left + i/WIDTH*panel_size + p*WIDTH + i%WIDTH;
                float *         out  = sums + i*n_columns + j;
                const int64_t   rest = n_columns - j, rows = end_row - i;
                if (rest > 2*WIDTH) {
                    add_tile(3, out, n_columns, rows, rest, x, y, panel_size, n);
                } else if (rest > WIDTH) {
                    add_tile(2, out, n_columns, rows, rest, x, y, panel_size, n);
                } else {
                    add_tile(1, out, n_columns, rows, rest, x, y, panel_size, n);
                }
            }
        }
    }
}

#else

bool ggml_ext_has_bf16_sums(void) {
    return false;
}

void ggml_ext_pack_bf16(const float * x, int64_t stride, int64_t n_tokens, int64_t n_columns, void * packed) {
    GGML_UNUSED(x), GGML_UNUSED(stride), GGML_UNUSED(n_tokens), GGML_UNUSED(n_columns), GGML_UNUSED(packed);
}

void ggml_ext_pack_bf16_transposed(const float * x, int64_t stride, int64_t n_rows, int64_t n_columns, void * packed) {
    GGML_UNUSED(x), GGML_UNUSED(stride), GGML_UNUSED(n_rows), GGML_UNUSED(n_columns), GGML_UNUSED(packed);
}

void ggml_ext_add_bf16(float * sums, int64_t n_columns, const void * left, const void * right, int64_t n_tokens, int64_t first_row,
                       int64_t end_row, int64_t first_column) {
    GGML_UNUSED(sums), GGML_UNUSED(n_columns), GGML_UNUSED(left), GGML_UNUSED(right), GGML_UNUSED(n_tokens), GGML_UNUSED(first_row);
    GGML_UNUSED(end_row), GGML_UNUSED(first_column);
}

#endif
