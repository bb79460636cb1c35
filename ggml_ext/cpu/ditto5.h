// DITTO5 over the SIMD primitives (format: types/ditto5.h).
#pragma once

#include "unpack.h"

namespace ggml_ext {

template <> struct unpacker<block_ditto5> {
    u8x64   low[2], signs; // signs: as bits3::qh
    table16 codebook, flip;
    float   d;
    static constexpr float offset = DITTO5_OFFSET;

    explicit unpacker(const block_ditto5 * x)
        : low{load64(x->ql), load64(x->ql + 64)}, signs(join(load(x->qh), field<4>(load(x->qh), 15))),
          codebook(load_table16(ggml_ext_ditto5_codebook)), flip(load_table16(FLIP)), d(half_to_float(x->d)) {}

    template <int G> u8x64 groups() const {
        return look_up(codebook, field<4*(G%2)>(low[G/2], 15)) ^ look_up(flip, field<G>(signs, 1));
    }

private:
    static constexpr uint8_t FLIP[16] = {0, 127};
};

} // namespace ggml_ext
