// The tiled GEMM for blocks of 64: rows of any number of blocks, four scales per 256 weights. Upstream's driver requires blocks of 256,
// so this is a separate driver around its tiles and microkernels. Included by tiled.cpp.
#pragma once

// The scales of four blocks as integers times one float, the form in which a tile stores them. Scales have few mantissa bits: those within
// five octaves of the largest are exact multiples of the float, by integers below 2^9. Smaller ones take another pass over the tile, in
// which the scales already applied are zero.
// Integer sums stay below 2^31: 256 * 127 * 127 * 511.
struct tiled_ext_scales {
    float remaining[GGML_EXT_GROUP_BLOCKS];

    // Compute the scales of the next pass and return their float. *more: scales remain for another pass.
    float next(int32_t * scale, bool * more) {
        float largest = 0.0f;
        for (const float d : remaining) {
            largest = largest != largest || d <= largest ? largest : d; // keeps NaN
        }
        int exponent = 0;
        frexpf(largest, &exponent);
        const bool  finite = largest <= FLT_MAX;
        const float unit   = largest == 0.0f || !finite ? largest : ldexpf(1.0f, exponent - 9);
        for (int b = 0; b < GGML_EXT_GROUP_BLOCKS; ++b) {
            const float s    = largest > 0.0f && finite ? remaining[b]/unit : 0.0f; // exact: a power of two
            const bool  fits = s == (float) (int32_t) s;
            scale[b] = fits ? (int32_t) s : 0;
            remaining[b]  = fits ? 0.0f : remaining[b];
            *more   |= !fits;
        }
        return unit;
    }
};

// Load column j of a tile in the order of the weights; NULL is zero.
static void tiled_ext_load_column(const block_q8_kr64 * y, tiled_tile_src1 * tile, int j) {
    static const block_q8_kr64 zero_block = {};
    y = y ? y : &zero_block;
    int8_t * q = &tile->q[j*TILED_TILE_K];
    ggml_ext::order_blocks(y->qs, q);
    for (int k = 0; k < TILED_TILE_K; k += 32) {
        int16_t sums[2];
        ggml_ext::sums_of_16(ggml_ext::load((const uint8_t *) q + k), sums);
        tile->bsums[(k/16)*TILED_TILE_ROWS + j]     = sums[0];
        tile->bsums[(k/16 + 1)*TILED_TILE_ROWS + j] = sums[1];
    }
    tile->d[j] = y->d[0];
}

// Multiply one window of rows of src0 with n_src1 columns y: acc[i*TILED_TILE_ROWS + j] is the product of row i and column j.
template <typename B>
static void tiled_ext_window(const char * src0, size_t nb01, int n_src0, const block_q8_kr64 * const * y, int n_src1,
                             int64_t n_blocks, tiled_ws * ws) {
    using t = tiled_ext<B>;
    constexpr int BLOCKS = GGML_EXT_GROUP_BLOCKS, NB = t::n_sub;
    static_assert(ggml_ext::group_blocks<B> == BLOCKS && !ggml_ext::has_scales<B>, "blocks of 64 with one scale");
    tiled_tile_src0 & tile = ws->src0;
    tiled_tile_src1 & cols = ws->src1;
    ggml_ext_cpu_count_tile();
    for (int i = 0; i < GGML_PAD(n_src0, TILED_MICRO); i++) {
        memset(&ws->acc[i*TILED_TILE_ROWS], 0, GGML_PAD(n_src1, TILED_MICRO)*sizeof(float));
        tile.d[i] = tile.dmin[i] = 0.0f;
    }
    for (int64_t ib = 0; ib < n_blocks; ib += BLOCKS) {
        tiled_ext_scales scales[TILED_TILE_ROWS];
        bool first = true, more = true;
        while (more) {
            more = false;
            for (int r = 0; r < n_src0; r++) {
                const ggml_ext::unpacker<B> u = ggml_ext::load_blocks((const B *) (src0 + r*nb01) + ib, n_blocks - ib);
                ggml_ext::unpack_blocks(u, &tile.q[r*TILED_TILE_K]); // in every pass: repacking is in place
                if (first) {
                    ggml_ext::store4(scales[r].remaining, u.d);
                }
                int32_t scale[BLOCKS];
                tile.d   [r] = scales[r].next(scale, &more);
                tile.dmin[r] = tile.d[r]*u.offset;
                for (int s = 0; s < NB; s++) {
                    tile.scales[r*NB + s] = tile.mins[r*NB + s] = scale[s*BLOCKS/NB];
                }
            }
            tiled_repack_src0<t::subblk>(&tile, n_src0, 1, t::bias, t::actbias);
            for (int j0 = 0; j0 < n_src1; j0 += TILED_MICRO) {
                if (first) {
                    for (int j = j0; j < j0 + TILED_MICRO; j++) {
                        tiled_ext_load_column(j < n_src1 ? y[j] + ib/BLOCKS : nullptr, &cols, j);
                    }
                    tiled_repack_src1(&cols, j0, 1, t::actbias);
                }
                for (int i0 = 0; i0 < n_src0; i0 += TILED_MICRO) {
                    tiled_run_microtile<t::subblk, t::has_min, t::bias, t::actbias>(tile, cols, i0, j0, 1, 0, ws->acc,
                                                                                    TILED_TILE_ROWS);
                }
            }
            first = false;
        }
    }
}

// Columns of src1, and the destinations of their products.
struct tiled_ext_columns {
    const block_q8_kr64 * y[TILED_TILE_ROWS];
    float               * dst[TILED_TILE_ROWS];
};

// Multiply rows ir0 ... ir0 + n_src0 - 1 of src0 with n columns.
template <typename B>
static void tiled_ext_rows(const ggml_tensor * src0, const char * src0_cur, int64_t ir0, int n_src0, tiled_ext_columns & c, int n,
                           tiled_ws * ws) {
    const int64_t n_blocks = src0->ne[0]/ggml_ext::traits<B>::block_size;
    tiled_ext_window<B>(src0_cur + ir0*src0->nb[1], src0->nb[1], n_src0, c.y, n, n_blocks, ws);
    float * dst[TILED_TILE_ROWS];
    for (int j = 0; j < n; j++) {
        dst[j] = c.dst[j] + ir0;
    }
    tiled_store_window_scatter(ws->acc, n_src0, n, TILED_TILE_ROWS, dst);
}

template <typename B>
static void tiled_ext_mul_mat(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    GGML_TENSOR_BINARY_OP_LOCALS
    const int ith = params->ith, nth = params->nth;
    const int64_t n_cols   = ne11*ne12*ne13;
    const size_t  row_size = ggml_row_size(GGML_TYPE_Q8_KR64, ne10);
    char * wdata = (char *) params->wdata;
    GGML_ASSERT(src1->type == GGML_TYPE_F32 && nb10 == sizeof(float) && nb0 == sizeof(float));

    for (int64_t j = ith; j < n_cols; j += nth) {
        const int64_t i13 = j/(ne12*ne11), i12 = j/ne11%ne12, i11 = j%ne11;
        const char * row = (const char *) src1->data + i13*nb13 + i12*nb12 + i11*nb11;
        ggml_ext_quantize_row_q8_kr64((const float *) row, wdata + j*row_size, ne10);
    }
    // Halve the chunks of rows and columns until every thread has four.
    int64_t chunk = TILED_TILE_ROWS;
    const auto chunks = [&](int64_t n) { return (n + chunk - 1)/chunk; };
    while (chunks(ne01)*chunks(n_cols) < 4*nth && chunk > TILED_MICRO) {
        chunk /= 2;
    }
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth); // each thread begins with chunk ith
    }
    ggml_barrier(params->threadpool);

    const uintptr_t slots = GGML_PAD((uintptr_t) wdata + GGML_PAD(n_cols*row_size, 64), 64);
    tiled_ws * ws = (tiled_ws *) (slots + (size_t) ith*ggml_tiled_ws_size());
    const int64_t n_chunks0 = chunks(ne01), n_chunks = n_chunks0*chunks(n_cols);
    for (int64_t k = ith; k < n_chunks; k = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t ir0 = k%n_chunks0*chunk, j_end = MIN((k/n_chunks0 + 1)*chunk, n_cols);
        int64_t j = k/n_chunks0*chunk;
        while (j < j_end) { // columns that share a matrix of src0
            const int64_t i13 = j/(ne12*ne11), i12 = j/ne11%ne12;
            const int64_t end = MIN(j_end, (j/ne11 + 1)*ne11);
            tiled_ext_columns c;
            int n = 0;
            for (; j < end; j++, n++) {
                c.y[n]   = (const block_q8_kr64 *) (wdata + j*row_size);
                c.dst[n] = (float *) ((char *) dst->data + i13*nb3 + i12*nb2 + j%ne11*nb1);
            }
            const char * src0_cur = (const char *) src0->data + i12/(ne12/ne02)*nb02 + i13/(ne13/ne03)*nb03;
            tiled_ext_rows<B>(src0, src0_cur, ir0, (int) MIN(chunk, ne01 - ir0), c, n, ws);
        }
    }
}

// Multiply one expert with its cne1 quantized rows of src1.
template <typename B>
static void tiled_ext_mul_mat_id(const ggml_compute_params * params, ggml_tensor * dst, const int32_t * expert_rows,
                                 int64_t cur_a, int64_t cne1, char * scratch) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    GGML_TENSOR_BINARY_OP_LOCALS
    const size_t row_size = ggml_row_size(GGML_TYPE_Q8_KR64, ne10);
    tiled_ws * ws = (tiled_ws *) (scratch + (size_t) params->ith*ggml_tiled_ws_size());
    const int64_t n_groups = (ne01 + TILED_MMID_GROUP - 1)/TILED_MMID_GROUP;
    const int64_t g_end    = n_groups*(params->ith + 1)/params->nth;
    for (int64_t j0 = 0; j0 < cne1; j0 += TILED_TILE_ROWS) {
        tiled_ext_columns c;
        const int n = (int) MIN(TILED_TILE_ROWS, cne1 - j0);
        for (int j = 0; j < n; j++) {
            const int64_t id = expert_rows[2*(j0 + j)], i12 = expert_rows[2*(j0 + j) + 1];
            c.y[j]   = (const block_q8_kr64 *) ((const char *) params->wdata + (id%ne11 + i12*ne11)*row_size);
            c.dst[j] = (float *) ((char *) dst->data + id*nb1 + i12*nb2);
        }
        for (int64_t g = n_groups*params->ith/params->nth; g < g_end; g++) {
            const int64_t ir0    = g*TILED_MMID_GROUP;
            const int     n_rows = (int) MIN(TILED_MMID_GROUP, ne01 - ir0);
            tiled_ext_rows<B>(src0, (const char *) src0->data + cur_a*nb02, ir0, n_rows, c, n, ws);
        }
    }
}

template <typename B>
static bool tiled_ext_dispatch(const ggml_compute_params * params, ggml_tensor * dst, const int32_t * expert_rows, int64_t cur_a,
                               int64_t cne1, char * scratch) {
    using t = tiled_ext<B>;
    const int64_t n_cols = expert_rows ? cne1 : dst->src[1]->ne[1];
    if (n_cols < ggml_ext_cpu_tiled_columns(dst->src[0]->type) && !ggml_tiled_matmul_forced()) {
        return false; // handled by ggml_ext_mul_mat_chunk() and ggml_ext_mul_mat_id_chunk()
    }
    if constexpr (ggml_ext::group_blocks<B> == 1) {
        return tiled_matmul_dispatch<B, t::subblk, t::has_min, t::bias, t::actbias>(params, dst, expert_rows, cur_a, cne1, scratch);
    } else if (expert_rows == NULL) {
        tiled_ext_mul_mat<B>(params, dst);
    } else {
        tiled_ext_mul_mat_id<B>(params, dst, expert_rows, cur_a, cne1, scratch);
    }
    return true;
}
