// Constants and arguments shared by the Metal kernels and their host code, for C, C++, Objective-C and Metal.
#pragma once

// mul_mv: rows per simdgroup, and simdgroups per threadgroup, without and with a table in threadgroup memory.
#define GGML_EXT_METAL_NR0       4
#define GGML_EXT_METAL_NSG       2
#define GGML_EXT_METAL_NSG_TABLE 4

// Bytes of the table: two per trellis state.
#define GGML_EXT_METAL_TABLE_BYTES (2*4096)

// Columns that mul_mv multiplies in one pass over the weights.
#define GGML_EXT_METAL_MAX_COLUMNS 4

// Simdgroups per threadgroup of the rotation; each takes 256 values.
#define GGML_EXT_METAL_NSG_ROTATE 4

// kernel_ext_rotate: ne0 values per row, strides of the source in bytes, contiguous result in the order of the codes (rotation.metal).
typedef struct {
    int32_t  ne0;
    int32_t  ne1;
    int32_t  ne2;
    uint64_t nb1;
    uint64_t nb2;
    uint64_t nb3;
} ggml_ext_metal_kargs_rotate;
