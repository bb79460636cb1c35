#include "syrk.h"

#include <algorithm>
#include <cstring>

// Columns are packed in panels of 16, tokens consecutive, so 16 x 16 products stream through two panels for any distance of rows. Threads
// take tiles of 4 x 4 panels: both sides, 256 KB, stay in the L2 cache.
static constexpr int W    = 16;
static constexpr int TILE = 4;

size_t ggml_ext_syrk::packed_size(int64_t n_cols) {
    return (size_t) ((n_cols + W - 1) / W * W) * GGML_EXT_SYRK_ROWS;
}

void ggml_ext_syrk::pack(int ith, int nth) const {
    const int64_t n_panels = (n_cols + W - 1) / W;
    for (int64_t p0 = (int64_t) ith * TILE; p0 < n_panels; p0 += (int64_t) nth * TILE) {
        const int64_t p1 = std::min(p0 + TILE, n_panels);
        for (int t = 0; t < n_rows; ++t) {
            for (int64_t p = p0; p < p1; ++p) {
                // values beyond n_cols are multiplied but not used
                memcpy(packed + (p * n_rows + t) * W, rows[t] + p * W, std::min<int64_t>(W, n_cols - p * W) * sizeof(float));
            }
        }
    }
}

// sums[i][j] = sum over tokens of a[t][i] b[t][j], ROWS rows at a time in registers of LANES floats.
template <int LANES, int ROWS>
static inline __attribute__((always_inline)) void multiply(const float * a, const float * b, int n, float * sums) {
    typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
    for (int i0 = 0; i0 < W; i0 += ROWS) {
        vec sum[ROWS][W / LANES] = {};
        for (int t = 0; t < n; ++t) {
            for (int v = 0; v < W / LANES; ++v) {
                const vec y = *(const vec *) (b + t * W + v * LANES);
                for (int i = 0; i < ROWS; ++i) {
                    sum[i][v] += a[t * W + i0 + i] * y;
                }
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < W / LANES; ++v) {
                *(vec *) (sums + (i0 + i) * W + v * LANES) = sum[i][v];
            }
        }
    }
}

// Programs are built for any x86-64. target_clones would not help, because the lanes are part of the source. On a Zen 4 core: AVX-512 118,
// AVX2 108, SSE2 38 GFLOP/s.
typedef void (*multiply_t)(const float * a, const float * b, int n, float * sums);
static void multiply_any(const float * a, const float * b, int n, float * sums) {
    multiply<4, 4>(a, b, n, sums);
}
#if defined(__x86_64__) && __GNUC__ >= 12
__attribute__((target("avx2,fma")))
static void multiply_avx2(const float * a, const float * b, int n, float * sums) {
    multiply<8, 4>(a, b, n, sums);
}
__attribute__((target("avx512f")))
static void multiply_avx512(const float * a, const float * b, int n, float * sums) {
    multiply<16, 8>(a, b, n, sums);
}
static multiply_t choose_multiply() {
    return __builtin_cpu_supports("avx512f")                                ? multiply_avx512
           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? multiply_avx2
                                                                             : multiply_any;
}
#else
static multiply_t choose_multiply() {
    return multiply_any;
}
#endif

void ggml_ext_syrk::add() {
    static const multiply_t multiply_panels = choose_multiply();

    const int64_t block         = full ? n_cols : GGML_EXT_MOMENTS_BLOCK;
    const int64_t tiles_across  = (block + TILE * W - 1) / (TILE * W);
    const int64_t tiles_a_block = tiles_across * (tiles_across + 1) / 2;
    const int64_t n_tiles       = (n_cols + block - 1) / block * tiles_a_block;

    for (int64_t tile = next_tile++; tile < n_tiles; tile = next_tile++) {
        const int64_t first = tile / tiles_a_block * block; // first column of the block
        const int64_t width = std::min(block, n_cols - first);
        float *       sums  = totals + first / block * (block * (block + 1) / 2);
        int64_t ti = 0, tj = tile % tiles_a_block; // position of the tile in the triangle
        for (; tj > ti; tj -= ++ti) {
        }
        for (int64_t i0 = ti * TILE * W; i0 < std::min(width, (ti + 1) * TILE * W); i0 += W) {
            for (int64_t j0 = tj * TILE * W; j0 <= std::min(i0, (tj + 1) * TILE * W - 1); j0 += W) {
                float product[W * W];
                multiply_panels(packed + (first + i0) * n_rows, packed + (first + j0) * n_rows, n_rows, product);
                for (int64_t i = i0; i < std::min(width, i0 + W); ++i) {
                    float * row = sums + i * (i + 1) / 2;
                    for (int64_t j = j0; j <= std::min(i, j0 + W - 1); ++j) {
                        row[j] += product[(i - i0) * W + j - j0];
                    }
                }
            }
        }
    }
}
