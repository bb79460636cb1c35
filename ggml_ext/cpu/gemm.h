// Products with many columns: a GEMM of bytes. PANEL_ROWS rows of 256 weights are unpacked to a panel, which is multiplied with up to 512
// columns. mul-mat.cpp divides an operation into such calls; gemm.cpp has the functions of each type, gemm/ what differs between instruction sets.
//
// A product is the sum over scales s of d_s * (d_y * sum of q*y under s - offset * d_y * sum of y under s). The sums of integers are
// exact, and the float operations and their order are the same on all instruction sets. So a product that the GEMM computes does
// not depend on the number of rows, columns or threads.
#pragma once

#include "simd.h"

#if defined(GGML_EXT_AVX2) || (defined(GGML_EXT_NEON) && defined(__ARM_FEATURE_DOTPROD))
#define GGML_EXT_GEMM

namespace ggml_ext {

#if defined(GGML_EXT_AVX512)
constexpr int PANEL_ROWS = 32;
#else
constexpr int PANEL_ROWS = 16;
#endif
constexpr int MAX_PANEL_SCALES = 4; // of 256 weights

// 256 weights of PANEL_ROWS rows. Four weights of a row are adjacent, because one instruction adds their products; with i8mm, eight
// (gemm/neon.h).
struct alignas(64) weight_panel {
    uint8_t codes[QK_K/4][PANEL_ROWS][4];
    float   d[MAX_PANEL_SCALES][PANEL_ROWS];
    float   offset[PANEL_ROWS]; // of types whose blocks have their own
};

// Quantized columns of 256 weights, in the order of a weight_panel.
struct column_panel {
    int8_t * codes;  // 256 per column, aligned to 64 bytes
    float  * d;      // scale of each column
    float  * sums;   // sums[s*stride + column]: d times the sum of the codes under scale s, times an offset that all blocks share
    int64_t  stride;

    column_panel from(int64_t column) const { return {codes + column*QK_K, d + column, sums + column, stride}; }
};

// Bytes per column of a column_panel.
static inline size_t column_size(int n_scales) { return QK_K + (1 + n_scales)*sizeof(float); }

struct gemm_functions {
    int     n_scales;    // of 256 weights
    int64_t min_columns; // of a matrix: with fewer, dot products are faster (docs/results/speed.md)

    // Unpack 256 weights of the rows at `rows`, `stride` bytes apart. Blocks from n_blocks on are treated as zero, and rows
    // from n_rows on as the last.
    void (*pack_rows)(const char * rows, size_t stride, int n_rows, int64_t n_blocks, weight_panel & panel);
    // Write 256 quantized activations as the first column of a panel.
    void (*pack_column)(const void * activations, const column_panel & out);
    // Add the products of PANEL_ROWS*n_panels rows and n_columns columns to products[panel][column][row]. Up to 15 columns beyond the last
    // must be readable.
    void (*multiply)(const weight_panel * weights, int n_panels, const column_panel & y, int n_columns, float * products);
};

// Return the functions of a type, or NULL for upstream types and blocks of 32.
const gemm_functions * find_gemm(ggml_type type);

// Surrounds calls of multiply() in a thread.
class gemm_scope {
    [[maybe_unused]] alignas(64) char previous[64]; // configuration of AMX tiles
public:
    gemm_scope();
    ~gemm_scope();
};

} // namespace ggml_ext
#endif
