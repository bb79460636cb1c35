// Host code for ggml-ext types on Metal, for C, C++ and Objective-C.
#pragma once

#include "ggml-ext-supports.h"
#include "args.h"
#include "types/codes.h"

// Block size of a rotated type, 0 for other types.
static inline int ggml_ext_metal_rotated_block(enum ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return GGML_EXT_##NAME##_ROTATED ? GGML_EXT_##NAME##_BLOCK_SIZE : 0;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return 0;
    }
}

static inline bool ggml_ext_metal_has_table(enum ggml_type type) {
    switch (type) {
        GGML_EXT_TRELLIS_CASES return true;
        default:               return false;
    }
}

static inline bool ggml_ext_metal_is_weight_type(enum ggml_type type) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES return true;
        default:              return false;
    }
}

// Pipelines of mul_mv: simdgroups per threadgroup, threadgroup memory, columns per pass and the suffix of the kernel's name.
static inline int ggml_ext_metal_nsg(enum ggml_type type) {
    return ggml_ext_metal_has_table(type) ? GGML_EXT_METAL_NSG_TABLE : GGML_EXT_METAL_NSG;
}
static inline size_t ggml_ext_metal_smem(enum ggml_type type) {
    return ggml_ext_metal_has_table(type) ? GGML_EXT_METAL_TABLE_BYTES : 0;
}
// distribute the columns evenly over the fewest passes
static inline int ggml_ext_metal_columns(int n_columns) {
    const int n_passes = (n_columns + GGML_EXT_METAL_MAX_COLUMNS - 1)/GGML_EXT_METAL_MAX_COLUMNS;
    return (n_columns + n_passes - 1)/n_passes;
}
static inline const char * ggml_ext_metal_suffix(int columns) {
    switch (columns) {
        case 2:  return "_r1_2";
        case 3:  return "_r1_3";
        case 4:  return "_r1_4";
        default: return "";
    }
}

// Scratch memory of rotated activations, after the result and after upstream's own data there. A product may use it only itself:
// the allocator reuses it once another node takes over the result's memory.
static inline size_t ggml_ext_metal_scratch_offset(size_t n_bytes) {
    return GGML_PAD(n_bytes, 32); // alignment of buffers
}
static inline size_t ggml_ext_metal_alloc_size(const struct ggml_tensor * op, size_t n_bytes) {
    if ((op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) || !op->src[0] || !op->src[1] ||
        !ggml_ext_metal_rotated_block(op->src[0]->type)) {
        return n_bytes;
    }
    return ggml_ext_metal_scratch_offset(n_bytes) + sizeof(float)*(size_t) ggml_nelements(op->src[1]);
}

// Threads per row of get_rows: a simdgroup per 256 weights.
static inline int ggml_ext_metal_row_threads(int64_t n_per_row) {
    return (int) ((n_per_row + 255)/256*32);
}

// Whether upstream's mul_mm_id has a kernel that sorts n_used experts per token.
static inline bool ggml_ext_metal_has_map0(int64_t n_used) {
    switch (n_used) {
        case 1: case 2: case 4: case 5: case 6: case 8: case 10: case 16: case 22: return true;
        default:                                                                   return false;
    }
}

// Whether Metal has a kernel for op. Called only for operations on ggml-ext types.
static inline bool ggml_ext_metal_supports_op(const struct ggml_tensor * op, bool has_simdgroup_reduction) {
    const struct ggml_tensor * w = op->src[0];
    const struct ggml_tensor * x = op->src[1];
    if (!has_simdgroup_reduction || !w || !x || !ggml_ext_metal_is_weight_type(w->type) || op->type != GGML_TYPE_F32 ||
        w->nb[0] != ggml_type_size(w->type) || x->nb[0] != ggml_type_size(x->type)) {
        return false;
    }
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            return x->type == GGML_TYPE_F32;
        case GGML_OP_MUL_MAT_ID:
            return x->type == GGML_TYPE_F32 && op->src[2]->type == GGML_TYPE_I32 && op->src[2]->nb[0] == sizeof(int32_t) &&
                   ggml_ext_metal_has_map0(op->src[2]->ne[0]);
        case GGML_OP_GET_ROWS:
            return x->type == GGML_TYPE_I32 && op->nb[0] == sizeof(float);
        default:
            return false;
    }
}
