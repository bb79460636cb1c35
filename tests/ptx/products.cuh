// MMQ instances for selected tile columns only: a full instance takes 13 seconds to compile per architecture. The caller selects the
// tile (ptx_tile_columns), not mul_mat_q_switch_J().
#pragma once

#include "ggml-cuda/mmq.cuh"

extern int ptx_tile_columns;

template <ggml_type type, bool fallback, int... J>
static void launch_tile(ggml_backend_cuda_context & ctx, const mmq_args & args, cudaStream_t stream) {
    const bool launched = ((J == ptx_tile_columns && (launch_mul_mat_q<type, J, fallback>(ctx, args, stream), true)) || ...);
    GGML_ASSERT(launched && "no tile of that many columns is compiled");
}

// fallback: the number of rows is not a multiple of the tile's
#define PTX_TILES(type, fallback, ...)                                                                                              \
    template <> void mul_mat_q_switch_J<type, fallback>(ggml_backend_cuda_context & ctx, const mmq_args & args, cudaStream_t s) { \
        launch_tile<type, fallback, __VA_ARGS__>(ctx, args, s);                                                                   \
    }
