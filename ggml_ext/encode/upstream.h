// Encode upstream's types under a Hessian.
#pragma once

#include "upstream-metric.h"

// Columns that one decision covers: 1 for scalar types, 4 or 8 for codebook types, 0 for types without such an encoder.
int upstream_columns(enum ggml_type type);

// Encode rows as ggml_quantize_chunk() does, then improve codes and scales. For each Hessian, a row keeps the result of less cost.
// importance: NULL means the diagonal of H for codebook types. sweeps: over each Hessian after the first codes.
void upstream_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                     const struct upstream_metric * m, int sweeps);

// upstream_encode() for each kind of types.
void upstream_encode_scalars(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                             const struct upstream_metric * m, int sweeps);
void upstream_encode_codebooks(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                               const struct upstream_metric * m, int sweeps);
