// What Metal's kernels and the host code that starts them agree on: C, C++, Objective-C and Metal.
#pragma once

// Rows a simdgroup multiplies, and simdgroups a threadgroup: four where each fills a table in threadgroup memory first.
#define GGML_EXT_METAL_NR0       4
#define GGML_EXT_METAL_NSG       2
#define GGML_EXT_METAL_NSG_TABLE 4

// Bytes of that table: a half for each state of a trellis code.
#define GGML_EXT_METAL_TABLE_BYTES (2*4096)

// Columns that mul_mv takes in one pass over the weights.
#define GGML_EXT_METAL_MAX_COLUMNS 4

// Simdgroups of a threadgroup that rotates; each takes 256 values.
#define GGML_EXT_METAL_NSG_ROTATE 4

// kernel_ext_rotate: ne0 values a row, rows (i1, i2, i3) at strides in bytes; the result is contiguous.
typedef struct {
    int32_t  ne0;
    int32_t  ne1;
    int32_t  ne2;
    uint64_t nb1;
    uint64_t nb2;
    uint64_t nb3;
} ggml_ext_metal_kargs_rotate;
