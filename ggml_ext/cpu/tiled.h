// Tile unpack of all ggml-ext types for ggml-cpu/tiled. Included by tiled.cpp.
#pragma once

#include "ggml-ext-cpu.h"
#include "all.h"

// All types use Q4_K's microkernel instance, so none is added. Sub-blocks of 32 have the group's integer scale as scale and min; the
// block's own d and offset are the float factors.
template <typename B> struct tiled_ext {
    using t = ggml_ext::traits<B>;
    static_assert(t::group >= 32 && t::q_min >= 0, "needs another microkernel instance");
    static constexpr int  subblk  = 32;
    static constexpr bool has_min = true;
    static constexpr int  bias    = 0;
    static constexpr bool actbias = false;
    static constexpr int  n_sub   = TILED_TILE_K/subblk;
};

template <typename B> static inline int group_scale(const ggml_ext::unpacker<B> & u, int j) {
    if constexpr (ggml_ext::has_scales<B>) {
        return u.scale(j/ggml_ext::traits<B>::group);
    } else {
        GGML_UNUSED(u);
        GGML_UNUSED(j);
        return 1;
    }
}

template <typename B>
static void tiled_unpack_src0(const B * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    GGML_ASSERT(n_rows <= TILED_TILE_ROWS);
    constexpr int NB = tiled_ext<B>::n_sub;
    ggml_ext_cpu_count_tile();
    for (int slab = 0; slab < num_k; slab++) {
        for (int r = 0; r < n_rows; r++) {
            const ggml_ext::unpacker<B> u(&rows[r*row_stride + slab]);
            tile->d   [slab*TILED_MICRO + r] = u.d;
            tile->dmin[slab*TILED_MICRO + r] = u.d*u.offset;
            for (int s = 0; s < NB; s++) {
                const int scale = group_scale(u, s*tiled_ext<B>::subblk);
                tile->scales[(r*num_k + slab)*NB + s] = scale;
                tile->mins  [(r*num_k + slab)*NB + s] = scale;
            }
            ggml_ext::unpack_block_for_tile(u, &tile->q[(r*num_k + slab)*TILED_TILE_K]);
        }
    }
}
