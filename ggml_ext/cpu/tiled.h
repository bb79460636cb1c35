// Tile unpack for ggml-cpu/tiled, once for all of the extension's types. Included by tiled.cpp.
#pragma once

#include "ggml-ext-cpu.h"
#include "all.h"

// Microkernel instance of a type: unsigned codes, 32-wide sub-blocks whose scale and min are 1 (the block's own d and
// offset carry them). <32, true, 0, false> is the instance of Q4_K, so no kernel is added.
template <typename B> struct tiled_ext {
    static_assert(ggml_ext::traits<B>::q_min >= 0 && ggml_ext::traits<B>::has_offset && ggml_ext::traits<B>::group == QK_K,
                  "needs another microkernel instance");
    static constexpr int  subblk  = 32;
    static constexpr bool has_min = true;
    static constexpr int  bias    = 0;
    static constexpr bool actbias = false;
};

template <typename B>
static void tiled_unpack_src0(const B * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    GGML_ASSERT(n_rows <= TILED_TILE_ROWS);
    constexpr int NB = TILED_TILE_K/tiled_ext<B>::subblk;
    ggml_ext_cpu_count_tile();
    for (int slab = 0; slab < num_k; slab++) {
        for (int r = 0; r < n_rows; r++) {
            const B & x = rows[r*row_stride + slab];
            const ggml_ext::unpacker<B> u(x);
            tile->d   [slab*TILED_MICRO + r] = u.d;
            tile->dmin[slab*TILED_MICRO + r] = u.d*u.offset;
            for (int s = 0; s < NB; s++) {
                tile->scales[(r*num_k + slab)*NB + s] = 1;
                tile->mins  [(r*num_k + slab)*NB + s] = 1;
            }
            ggml_ext::unpack_block(x, &tile->q[(r*num_k + slab)*TILED_TILE_K]);
        }
    }
}
