// Choose the encoder for an upstream type.
#include "upstream.h"

#include "upstream-codebook-layouts.h"
#include "upstream-layouts.h"

int upstream_columns(enum ggml_type type) {
    const struct codebook_layout * t = codebook_layout(type);
    return upstream_layout(type) ? 1 : t ? t->columns : 0;
}

void upstream_encode(enum ggml_type type, const float * src, void * dst, int64_t n_rows, const float * importance,
                     const struct upstream_metric * m, int sweeps) {
    (upstream_layout(type) ? upstream_encode_scalars : upstream_encode_codebooks)(type, src, dst, n_rows, importance, m, sweeps);
}
