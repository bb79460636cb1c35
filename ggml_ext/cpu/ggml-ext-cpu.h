// What the CPU backend's tables point to.
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

// Products of n_rows rows of n weights, `stride` bytes apart, with n_cols columns of quantised activations: s[c][i] of row i and
// column c, the same floats whatever the other columns are. False if type is not the extension's.
GGML_BACKEND_API bool ggml_ext_dot_columns(enum ggml_type type, int64_t n, float * const * s, const void * x, size_t stride,
                                           int64_t n_rows, const void * const * y, int n_cols);

// The rows ir0 to ir0_end and columns ir1 to ir1_end of a mul_mat, or of one expert's mul_mat_id, whose columns are those of the
// pairs of numbers at expert_rows: place among a token's experts, token. wdata: quantised columns, row_size bytes each. False,
// and nothing is done, if the weights are not of the extension's types.
bool ggml_ext_mul_mat_chunk(const struct ggml_tensor * dst, const void * wdata, size_t row_size, int64_t ir0, int64_t ir0_end,
                            int64_t ir1, int64_t ir1_end);
bool ggml_ext_mul_mat_id_chunk(const struct ggml_tensor * dst, const void * wdata, size_t row_size, const char * expert,
                               const int32_t * expert_rows, int64_t ir0, int64_t ir0_end, int64_t ir1, int64_t ir1_end);

// x: n floats, n a multiple of 256 or of 64; y: n/256 block_q8_K or block_q8_kr64 of the rotated row, rounded up.
GGML_BACKEND_API void ggml_ext_quantize_row_q8_kr(const float * x, void * y, int64_t n);
GGML_BACKEND_API void ggml_ext_quantize_row_q8_kr64(const float * x, void * y, int64_t n);

// n rotated values, 256 at most, in blocks of 256 or 64, in place; x at a multiple of 32 bytes.
void ggml_ext_rotate_activations_back(float * x, int64_t n, int block_size);

// The conversion for the columns of dst, a product with quantized weights: from_float. In builds for tests the environment variable
// GGML_EXT_ACT_BITS=2..7 makes it round its codes to so many bits (tests/native/study-act-bits.cpp), at the speed of 8 bits.
#ifdef GGML_EXT_TESTS
ggml_from_float_t ggml_ext_study_from_float(const struct ggml_tensor * dst, enum ggml_type type, ggml_from_float_t from_float);
#else
#define ggml_ext_study_from_float(dst, type, from_float) (from_float)
#endif

// Where thread ith of nth begins to quantise a row of n activations, in blocks; it ends where the next begins. Rows of Q8_KR64
// are made as a whole: by turns, row by row.
static inline int64_t ggml_ext_first_block(enum ggml_type type, int64_t n, int64_t ith, int64_t nth, int64_t row) {
    const int64_t n_blocks = n/ggml_blck_size(type);
    return type == GGML_TYPE_Q8_KR64 ? (ith > row%nth ? n_blocks : 0) : ith*n_blocks/nth;
}

// Rows, and columns, that a thread takes at a time instead of `size`: all of a small matrix, whose rows then go to the threads in
// equal parts. Of 576 rows in chunks of 64 one of two threads would get five chunks and the other four, and smaller chunks cost
// more than they are worth: an atomic addition each, and columns laid out anew for each.
static inline int64_t ggml_ext_chunk_size(enum ggml_type type, int64_t n_rows, int64_t size) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES return n_rows < 16*64 ? n_rows : 64;
        default:              return size;
    }
}

// Marked products (ggml-ext-act-prec.h). compute_doubled() computes node by `compute`, of a node with twice the columns in the work
// buffer; false, and nothing is done, if node is not marked. planned_node() is that node, with the work_size that it needs beside
// its own, or else node. `doubled` holds its tensors.
struct ggml_compute_params;
bool ggml_ext_compute_doubled(struct ggml_compute_params * params, struct ggml_tensor * node,
                              void (*compute)(struct ggml_compute_params *, struct ggml_tensor *));
struct ggml_tensor * ggml_ext_planned_node(struct ggml_tensor * node, struct ggml_ext_doubled * doubled, size_t * work_size);

// The least number of columns that the tiled GEMM takes; it multiplies fewer no faster than dot_columns().
GGML_BACKEND_API int64_t ggml_ext_cpu_tiled_columns(enum ggml_type type);

// Whether an environment variable says yes: a number that is not 0. Unset, or with a warning anything but a number: otherwise.
bool ggml_ext_env_switch(const char * name, bool otherwise);

// For tests: the instruction set compiled in, and one block through the SIMD unpack.
GGML_BACKEND_API const char * ggml_ext_cpu_isa(void);
GGML_BACKEND_API bool         ggml_ext_cpu_unpack_block(enum ggml_type type, const void * block, uint8_t * q);

// In a build for tests: how many tiles the tiled GEMM has unpacked from the extension's types since the start of the process.
#ifdef GGML_EXT_TESTS
GGML_BACKEND_API int64_t ggml_ext_cpu_n_tiles(void);
void                     ggml_ext_cpu_count_tile(void);
#else
static inline void       ggml_ext_cpu_count_tile(void) {}
#endif

#ifdef __cplusplus
}
#endif
