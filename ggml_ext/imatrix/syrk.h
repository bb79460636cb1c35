// Sums over tokens of x x^T as packed lower triangles (SYRK in BLAS).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#define GGML_EXT_MOMENTS_BLOCK 256 // columns per block
#define GGML_EXT_SYRK_ROWS     512 // tokens summed in registers before they are added to the totals

// Floats per matrix of n_cols columns: the triangles of its blocks, the last perhaps smaller, or the full triangle.
inline int64_t ggml_ext_n_moments(int64_t n_cols, bool full) {
    const int64_t block = full ? n_cols : GGML_EXT_MOMENTS_BLOCK;
    const int64_t rest  = block ? n_cols % block : 0;
    return block ? n_cols / block * (block * (block + 1) / 2) + rest * (rest + 1) / 2 : 0;
}

// Add at most GGML_EXT_SYRK_ROWS rows. All threads call pack(); when all have returned, all call add().
struct ggml_ext_syrk {
    const float * const * rows; // n_cols floats each
    int                   n_rows;
    int64_t               n_cols;
    bool                  full;
    float *               packed;    // packed_size(n_cols) floats
    float *               totals;    // ggml_ext_n_moments() floats
    std::atomic<int64_t>  next_tile; // 0 before add()

    static size_t packed_size(int64_t n_cols);
    void pack(int ith, int nth) const;
    void add();
};
