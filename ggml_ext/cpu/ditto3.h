// DITTO3 over the SIMD primitives (format: types/ditto3.h).
#pragma once

#include "bits3.h"

namespace ggml_ext {

template <> struct unpacker<block_ditto3> {
    bits3    indices;
    table16  codebook;
    float    d;
    static constexpr float offset = DITTO3_OFFSET;

    explicit unpacker(const block_ditto3 * x)
        : indices(x->ql, x->qh), codebook(load_table(x->codebook, 127)), d(half_to_float(x->d)) {}

    template <int G> u8x64 groups() const { return look_up(codebook, indices.groups<G>()); }
};

} // namespace ggml_ext
