// MMQ for tiles of the numbers of columns that are wanted, since a whole instance takes 13 seconds to compile for one architecture.
// Which one a product takes is the caller's choice (ptx_tile_columns) in place of mul_mat_q_switch_J()'s.
#pragma once

#include "ggml-cuda/mmq.cuh"

extern int ptx_tile_columns;

template <ggml_type type, bool fallback, int... J>
static void launch_tile(ggml_backend_cuda_context & ctx, const mmq_args & args, cudaStream_t stream) {
    const bool found = ((J == ptx_tile_columns && (launch_mul_mat_q<type, J, fallback>(ctx, args, stream), true)) || ...);
    GGML_ASSERT(found && "tiles of that many columns were compiled");
}

// fallback: of rows that are no multiple of a tile's
#define PTX_TILES(type, fallback, ...)                                                                                              \
    template <> void mul_mat_q_switch_J<type, fallback>(ggml_backend_cuda_context & ctx, const mmq_args & args, cudaStream_t s) { \
        launch_tile<type, fallback, __VA_ARGS__>(ctx, args, s);                                                                   \
    }
