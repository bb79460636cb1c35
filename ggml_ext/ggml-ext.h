// Public interface of the extension, exported by libggml-base beside ggml's own.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Version of the interface in this header; raised by every incompatible change.
#define GGML_EXT_ABI_VERSION 7
GGML_API int ggml_ext_abi_version(void);

// Second moments E[x x^T] of what the weights of a tensor are multiplied with, rotated where the type is, damped and factorized
// once for all rows; read only, so that threads can share it.
struct ggml_ext_metric;

// Options of the encoders. Zero-initialise and set what you need: zero is the default of every field.
struct ggml_ext_quantize_params {
    int32_t       itq3_levels;     // ITQ3_S: 8 (default) or 3, the paper's ternary
    int32_t       trellis_passes;  // trellis types: scales tried a block, 1 to 6; more are slower and better
    const float * ditto3_codebook; // DITTO3: eight finite centroids in ascending order for all blocks; NULL: each its own
    const struct ggml_ext_metric * metric; // of the type and rows at hand, in place of imatrix; NULL: none
    int32_t       stock_sweeps;    // llama.cpp's types with a metric: 1 to 16 sweeps over codes and scales (default 2)
};

// ggml_quantize_chunk() with options, for the extension's weight types and, with a metric, for llama.cpp's scalar types and IQ3_S,
// IQ3_XXS, IQ2_S, IQ2_XS and IQ2_XXS. First scales of these are those of ggml_quantize_chunk() with the imatrix; where there is none
// the IQ2 and IQ3 types take the mean squares of the metric.
//   src      nrows*n_per_row floats beginning at element `start`, n_per_row a multiple of the block
//   imatrix  n_per_row importances or NULL
//   params   NULL for the defaults
// Returns the bytes written; 0 if type is none of these or an option is out of range.
GGML_API size_t ggml_ext_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start,
                                        int64_t nrows, int64_t n_per_row, const float * imatrix,
                                        const struct ggml_ext_quantize_params * params);

enum ggml_ext_metric_status {
    GGML_EXT_METRIC_OK,
    GGML_EXT_METRIC_BAD_ARGUMENT,
    GGML_EXT_METRIC_NO_MEMORY,
    GGML_EXT_METRIC_NOT_POSITIVE, // a value is not finite, a diagonal negative, or the damped matrix not positive definite
};

//   moments  lower triangles, row by row, in any scale: of each block of 256 columns in turn, the last of which may be shorter, or
//            with `whole` one of all columns
//   damping  above 0: what is added to the diagonal of each matrix, in units of its mean
//   segment  weights decided together: 32, 16 or 8; fewer are slower and better; no matter to llama.cpp's types
//   n_threads  of which the result does not depend
// NULL with the reason in *status.
GGML_API struct ggml_ext_metric * ggml_ext_metric_init(enum ggml_type type, int64_t n_per_row, const float * moments, bool whole,
                                                       float damping, int segment, int n_threads, enum ggml_ext_metric_status * status);
GGML_API void ggml_ext_metric_free(struct ggml_ext_metric * metric);

// One codebook for a whole tensor of DITTO3, in memory that does not depend on its size: add all rows to a histogram of
// GGML_EXT_DITTO3_BINS bins, then cluster the bins. Bins are 2^-10 of their value wide, and exact for rows that were F16 or
// BF16. sum_w and sum_wx hold importance and importance*weight of each bin, zero at first; imatrix as above. The order of
// the rows decides the last bits of the sums.
#define GGML_EXT_DITTO3_BINS (1 << 19)
GGML_API void ggml_ext_ditto3_add_rows(double * sum_w, double * sum_wx, const float * src, int64_t nrows,
                                       int64_t n_per_row, const float * imatrix);

// Centroids for ditto3_codebook. Returns false if no row was added (or memory is out).
GGML_API bool ggml_ext_ditto3_codebook(const double * sum_w, const double * sum_wx, float codebook[8]);

// The unpack contract of one block (scalar reference): its 256 or 64 codes, up to four integer scales, d and offset with
// value[j] = d * scale[j / group] * (q[j] - offset). Returns false for other types.
GGML_API bool ggml_ext_unpack_block(enum ggml_type type, const void * block, int8_t * q, int32_t * scale, float * d,
                                    float * offset);

// True if all blocks of a row hold finite scales (and whatever else the type demands).
GGML_API bool ggml_ext_validate_row(enum ggml_type type, const void * data, size_t n_blocks);

// In-place rotation of n_blocks blocks of block_size = 256 or 64 floats, and its inverse; see ggml-ext-rotation.h.
GGML_API void ggml_ext_rotate(float * x, int64_t n_blocks, int block_size);
GGML_API void ggml_ext_rotate_back(float * x, int64_t n_blocks, int block_size);

// Rotated activation types Q8_KR and Q8_KR64: scalar references of what the CPU backend's from_float does.
GGML_API void ggml_ext_quantize_row_q8_kr_ref(const float * x, void * y, int64_t n);
GGML_API void ggml_ext_quantize_row_q8_kr64_ref(const float * x, void * y, int64_t n);

#ifdef __cplusplus
}
#endif
