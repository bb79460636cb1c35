// ITQ3_S over the SIMD primitives (format: types/itq3_s.h).
#pragma once

#include "bits3.h"

namespace ggml_ext {

template <> struct unpacker<block_itq3_s> {
    bits3 codes;
    float d, offset;

    explicit unpacker(const block_itq3_s * x) : codes(x->ql, x->qh), d(half_to_float(x->d)), offset(half_to_float(x->z)) {}

    template <int G> u8x64 groups() const { return codes.groups<G>(); }
};

} // namespace ggml_ext
