// Sums over tokens of x x^T, packed lower triangles: what BLAS calls SYRK.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#define GGML_EXT_MOMENTS_BLOCK 256 // columns of a block
#define GGML_EXT_SYRK_ROWS     512 // tokens that are summed in registers before they join the totals

// Floats of one matrix of n_cols columns: of its blocks' triangles, the last block perhaps shorter, or of a whole one.
inline int64_t ggml_ext_n_moments(int64_t n_cols, bool whole) {
    const int64_t block = whole ? n_cols : GGML_EXT_MOMENTS_BLOCK;
    const int64_t rest  = block ? n_cols % block : 0;
    return block ? n_cols / block * (block * (block + 1) / 2) + rest * (rest + 1) / 2 : 0;
}

// The work of adding at most GGML_EXT_SYRK_ROWS rows: all threads call pack(), and when all are done, add().
struct ggml_ext_syrk {
    const float * const * rows; // of n_cols floats each
    int                   n_rows;
    int64_t               n_cols;
    bool                  whole;
    float *               packed; // packed_size(n_cols) floats
    float *               totals; // ggml_ext_n_moments() floats
    std::atomic<int64_t>  next_tile; // 0 before add()

    static size_t packed_size(int64_t n_cols);
    void pack(int ith, int nth) const;
    void add();
};
