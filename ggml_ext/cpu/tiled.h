// Tile unpack for ggml-cpu/tiled, once for all of the extension's types. Included by tiled.cpp.
#pragma once

#include "ggml-ext-cpu.h"
#include "all.h"

// Microkernel instance of a type, one of those that exist, so that no kernel is added. Sub-blocks are 32 wide with scale
// and min 1: the block's own d and offset carry them. Unsigned codes with an offset take Q4_K's instance, signed codes
// IQ4_XS's, which expects them plus 128.
template <typename B> struct tiled_ext {
    using t = ggml_ext::traits<B>;
    static_assert(t::group == QK_K && (t::q_min < 0) != t::has_offset, "needs another microkernel instance");
    static constexpr int  subblk  = 32;
    static constexpr bool has_min = t::has_offset;
    static constexpr int  bias    = t::q_min < 0 ? 128 : 0;
    static constexpr bool actbias = false;
};

template <typename B>
static void tiled_unpack_src0(const B * rows, int64_t row_stride, int n_rows, tiled_tile_src0 * tile, int num_k) {
    GGML_ASSERT(n_rows <= TILED_TILE_ROWS);
    constexpr int NB = TILED_TILE_K/tiled_ext<B>::subblk;
    ggml_ext_cpu_count_tile();
    for (int slab = 0; slab < num_k; slab++) {
        for (int r = 0; r < n_rows; r++) {
            const ggml_ext::unpacker<B> u(rows[r*row_stride + slab]);
            tile->d   [slab*TILED_MICRO + r] = u.d;
            if constexpr (ggml_ext::traits<B>::has_offset) {
                tile->dmin[slab*TILED_MICRO + r] = u.d*u.offset;
            }
            for (int s = 0; s < NB; s++) {
                tile->scales[(r*num_k + slab)*NB + s] = 1;
                tile->mins  [(r*num_k + slab)*NB + s] = 1;
            }
            uint8_t * q = &tile->q[(r*num_k + slab)*TILED_TILE_K];
            ggml_ext::unpack_block(u, q);
            if constexpr (tiled_ext<B>::bias != 0) {
                for (int j = 0; j < TILED_TILE_K; j++) {
                    q[j] = (uint8_t) (q[j] + tiled_ext<B>::bias);
                }
            }
        }
    }
}
