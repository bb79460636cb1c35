// Interface of the CPU kernels: what ggml-cpu's type traits and its patched matrix products call.
#pragma once

#include "ggml-ext-act-prec.h"
#include "ggml-ext-base.h"
#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define X(NAME, name)                                                                                              \
    GGML_BACKEND_API void ggml_ext_vec_dot_##name(int n, float * s, size_t bs, const void * vx, size_t bx,         \
                                                  const void * vy, size_t by, int nrc);                            \
    GGML_BACKEND_API void ggml_ext_quantize_row_##name(const float * x, void * y, int64_t n);
GGML_EXT_WEIGHT_TYPES(X)
#undef X

// Multiply n_rows rows of n weights, `stride` bytes apart, with n_cols columns of quantized activations. s[c][i] is the product of row i
// and column c; it does not depend on the other columns. Return false for upstream types.
GGML_BACKEND_API bool ggml_ext_dot_columns(enum ggml_type type, int64_t n, float * const * s, const void * x, size_t stride,
                                           int64_t n_rows, const void * const * y, int n_cols);

// Get the function that dequantizes a row of a type, for GET_ROWS.
GGML_BACKEND_API ggml_to_float_t ggml_ext_to_float(enum ggml_type type);

// Compute a MUL_MAT or MUL_MAT_ID with a ggml-ext type, and return the size of its work buffer. Return false for upstream types.
struct ggml_compute_params;
bool ggml_ext_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * op);
bool ggml_ext_mul_mat_work_size(int n_threads, const struct ggml_tensor * op, size_t * size);

// Quantize n floats (a multiple of 256, 64 or 32) to n/256 block_q8_K, block_q8_kr64 or block_q8_kr32, rounded up, of the rotated row.
GGML_BACKEND_API void ggml_ext_quantize_row_q8_kr(const float * x, void * y, int64_t n);
GGML_BACKEND_API void ggml_ext_quantize_row_q8_kr64(const float * x, void * y, int64_t n);
GGML_BACKEND_API void ggml_ext_quantize_row_q8_kr32(const float * x, void * y, int64_t n);

// Rotate n <= 256 values back in place, in blocks of 256, 64 or 32; x is aligned to 32 bytes.
void ggml_ext_rotate_activations_back(float * x, int64_t n, int block_size);

// Choose the activation conversion for a product with quantized weights. In test builds, GGML_EXT_ACT_BITS=2..7 rounds its codes to so
// many bits (tests/native/study-act-bits.cpp), at the speed of 8 bits.
#ifdef GGML_EXT_TESTS
ggml_from_float_t ggml_ext_study_from_float(const struct ggml_tensor * dst, enum ggml_type type, ggml_from_float_t from_float);
#else
#define ggml_ext_study_from_float(dst, type, from_float) (from_float)
#endif

// Products at act_prec f16 (ggml-ext-act-prec.h) have twice the columns. compute_doubled() calls `compute` on such a node, which it builds
// in the work buffer; it returns false if `node` is not marked. planned_node() returns that node, with the additional work_size it needs,
// or `node`. `doubled` holds its tensors.
bool ggml_ext_compute_doubled(struct ggml_compute_params * params, struct ggml_tensor * node,
                              void (*compute)(struct ggml_compute_params *, struct ggml_tensor *));
struct ggml_tensor * ggml_ext_planned_node(struct ggml_tensor * node, struct ggml_ext_doubled * doubled, size_t * work_size);

// Limit the threads of a graph to the CPUs that the process could use when it started: more threads than CPUs wait for each other at every
// barrier. The first time that this changes the number, say so.
GGML_BACKEND_API int ggml_ext_limit_threads(int n_threads);

// Read a switch from the environment: a number, true if it is not 0. Return `fallback` if it is unset or, with a warning, not a number.
bool ggml_ext_env_switch(const char * name, bool fallback);

// For tests: the instruction set, and the SIMD unpack of one block.
GGML_BACKEND_API const char * ggml_ext_cpu_isa(void);
GGML_BACKEND_API bool         ggml_ext_cpu_unpack_block(enum ggml_type type, const void * block, uint8_t * q);

// In test builds: number of panels that the GEMM has finished; the smallest number of columns of a MUL_MAT for it, INT64_MAX if the
// instruction set has none; the GEMM with the arguments of ggml_ext_dot_columns(), false if there is none; and products of bytes per second
// that its instructions can do in one thread, 0 if unknown.
#ifdef GGML_EXT_TESTS
GGML_BACKEND_API int64_t ggml_ext_cpu_gemm_columns(enum ggml_type type);
GGML_BACKEND_API double  ggml_ext_cpu_peak(void);
GGML_BACKEND_API int64_t ggml_ext_cpu_n_panels(void);
GGML_BACKEND_API bool    ggml_ext_gemm(enum ggml_type type, int64_t n, float * const * s, const void * x, size_t stride, int64_t n_rows,
                                       const void * const * y, int n_cols);
#endif

#ifdef __cplusplus
}
#endif
