// C interface of the extension, exported by libggml-base next to ggml's own.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Raised by every incompatible change of this header.
#define GGML_EXT_ABI_VERSION 9
GGML_API int ggml_ext_abi_version(void);

// A metric is the Hessian H = E[x x^T] of a tensor's inputs, ready for an encoder: rotated if the type is, shrunk, and factorized once
// for all rows. It is read-only, so threads can share it.
struct ggml_ext_metric;

// Encoder options. Zero-initialize; zero is the default of every field.
struct ggml_ext_quantize_params {
    int32_t       itq3_levels;             // ITQ3_S: 8 (default) or 3, the paper's ternary
    int32_t       trellis_passes;          // trellis types: scale candidates per block, 1 to 6; more are slower and better
    const float * ditto3_codebook;         // DITTO3: eight finite centroids in ascending order for all blocks; NULL: one codebook per block
    const struct ggml_ext_metric * metric; // for this type and row size; replaces imatrix. NULL: none
    int32_t       upstream_sweeps;         // upstream types with a metric: 1 to 16 sweeps over codes and scales (default 2)
};

// Encode rows as ggml_quantize_chunk() does, with options: ggml-ext types and, with a metric, upstream's scalar types and IQ3_S, IQ3_XXS,
// IQ2_S, IQ2_XS and IQ2_XXS. The initial scales of upstream types come from ggml_quantize_chunk() with the imatrix. Without one, the IQ2
// and IQ3 types use the diagonal of H.
//   src      nrows*n_per_row floats beginning at element `start`; n_per_row is a multiple of the block size
//   imatrix  n_per_row importances or NULL
//   params   NULL for the defaults
// Return the bytes written, or 0 if the type is not supported or an option is out of range.
GGML_API size_t ggml_ext_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start,
                                        int64_t nrows, int64_t n_per_row, const float * imatrix,
                                        const struct ggml_ext_quantize_params * params);

enum ggml_ext_metric_status {
    GGML_EXT_METRIC_OK,
    GGML_EXT_METRIC_BAD_ARGUMENT,
    GGML_EXT_METRIC_NO_MEMORY,
    GGML_EXT_METRIC_NOT_POSITIVE, // a value is not finite, a diagonal is negative, or the shrunk H is not positive definite
};

// Prepare a metric. Return NULL and set *status on failure.
//   H        lower triangles, row by row, at any scale: one of all columns with `full`, else one per 256 columns (the last may be shorter)
//   full     one Hessian of all columns, not block-diagonal
//   shrinkage  at least 0: H + shrinkage*diag(H) is encoded with, and 0.001 of the mean diagonal is added to that diagonal
//   segment  weights decided together: 32, 16 or 8; fewer are slower and better; upstream types ignore it
// The result does not depend on n_threads.
GGML_API struct ggml_ext_metric * ggml_ext_metric_init(enum ggml_type type, int64_t n_per_row, const float * H, bool full,
                                                       float shrinkage, int segment, int n_threads, enum ggml_ext_metric_status * status);
GGML_API void ggml_ext_metric_free(struct ggml_ext_metric * metric);

// One DITTO3 codebook for a full tensor, in constant memory: add all rows to a histogram of GGML_EXT_DITTO3_BINS bins, then cluster the
// bins. A bin is 2^-10 of its value wide and exact for F16 and BF16 rows. sum_w and sum_wx hold importance and importance*weight per
// bin, initially zero. The order of the rows affects the last bits of the sums.
#define GGML_EXT_DITTO3_BINS (1 << 19)
GGML_API void ggml_ext_ditto3_add_rows(double * sum_w, double * sum_wx, const float * src, int64_t nrows,
                                       int64_t n_per_row, const float * imatrix);

// Compute centroids for ditto3_codebook. Return false if no row was added or memory ran out.
GGML_API bool ggml_ext_ditto3_codebook(const double * sum_w, const double * sum_wx, float codebook[8]);

// The unpack contract of one block, scalar reference: 256, 64 or 32 codes, up to four integer scales, d and offset, where
// value[j] = d * scale[j / group] * (q[j] - offset). Return false for other types.
GGML_API bool ggml_ext_unpack_block(enum ggml_type type, const void * block, int8_t * q, int32_t * scale, float * d,
                                    float * offset);

// Check that every block of a row has finite scales.
GGML_API bool ggml_ext_validate_row(enum ggml_type type, const void * data, size_t n_blocks);

// Rotate n_blocks blocks of block_size = 256, 64 or 32 floats in place, or back (ggml-ext-rotation.h).
GGML_API void ggml_ext_rotate(float * x, int64_t n_blocks, int block_size);
GGML_API void ggml_ext_rotate_back(float * x, int64_t n_blocks, int block_size);

// Sums over tokens of outer products, sums[i][j] += left[t][i]*right[t][j], with factors rounded to BF16 and sums in float. Only if
// ggml_ext_has_bf16_sums(). packed: n_columns rounded up to 16, times n_tokens rounded up to 2, of 2 bytes.
//   first_row, end_row   rows of the sums to compute; first_row is a multiple of 16
//   first_column         the columns before it may be left out
GGML_API bool ggml_ext_has_bf16_sums(void);
GGML_API void ggml_ext_pack_bf16(const float * x, int64_t stride, int64_t n_tokens, int64_t n_columns, void * packed);
GGML_API void ggml_ext_pack_bf16_transposed(const float * x, int64_t stride, int64_t n_rows, int64_t n_columns, void * packed); // x^T
GGML_API void ggml_ext_add_bf16(float * sums, int64_t n_columns, const void * left, const void * right, int64_t n_tokens, int64_t first_row,
                                int64_t end_row, int64_t first_column);

// Scalar references of the CPU backend's from_float for the rotated activation types.
GGML_API void ggml_ext_quantize_row_q8_kr_ref(const float * x, void * y, int64_t n);
GGML_API void ggml_ext_quantize_row_q8_kr64_ref(const float * x, void * y, int64_t n);
GGML_API void ggml_ext_quantize_row_q8_kr32_ref(const float * x, void * y, int64_t n);

#ifdef __cplusplus
}
#endif
