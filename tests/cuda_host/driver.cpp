// The device code of cuda/ as a host library for Python (common.cuh).
#include "cuda/dequantize.cuh"
#include "cuda/mmq.cuh"
#include "cuda/mmvq.cuh"
#include "cuda/quantize.cuh"
#include "cuda/split.cuh"

#include <type_traits>

// Call f with a null pointer to a block of the type.
template <typename F> static auto dispatch(int type, F f) {
    switch (type) {
#define CASE(NAME, name) case GGML_TYPE_##NAME: return f((const block_##name *) nullptr);
        GGML_EXT_WEIGHT_TYPES(CASE)
#undef CASE
        default: GGML_ABORT("type %d is not a weight type", type);
    }
}
#define BLOCK_OF(tag) std::remove_const_t<std::remove_pointer_t<decltype(tag)>>

template <typename F> static void dispatch_result(int type, void * y, F f) {
    switch (type) {
        case GGML_TYPE_F32:  return f((float *) y);
        case GGML_TYPE_F16:  return f((half *) y);
        case GGML_TYPE_BF16: return f((nv_bfloat16 *) y);
        default: GGML_ABORT("type %d is not a result type", type);
    }
}

extern "C" {

uint32_t cuda_host_byte_perm(uint32_t lo, uint32_t hi, uint32_t s) { return __byte_perm(lo, hi, s); }
uint32_t cuda_host_prmt(uint32_t lo, uint32_t hi, uint32_t s) { return ggml_ext::prmt(lo, hi, s); }

// Same interface as ggml_ext_unpack_block().
void cuda_host_unpack(int type, const void * block, uint8_t * q, int32_t * scale, float * d, float * offset) {
    dispatch(type, [&](auto * tag) {
        using B = BLOCK_OF(tag);
        using T = ggml_ext::traits<B>;
        for (int k = 0; k < ggml_ext::N_THREADS<B>; ++k) {
            const ggml_ext::unpacked u = ggml_ext::unpack_by_group<B>(*(const B *) block, k);
            for (int g = 0; g < ggml_ext::N_WORDS; ++g) {
                memcpy(q + T::block_size/8*g + 4*k, &u.q[g], 4);
            }
            for (int s = 0; s < T::n_groups; ++s) {
                scale[s] = T::n_groups == 1 ? 1 : u.scale[s];
            }
            *d      = u.d;
            *offset = u.offset;
        }
    });
}

// Dot product of a row with a row of block_q8. The row begins at block ib0 of x.
float cuda_host_vec_dot(int type, const void * x, int64_t ib0, const void * y, int64_t n_blocks) {
    return dispatch(type, [&](auto * tag) {
        using B = BLOCK_OF(tag);
        using U = ggml_cuda_type_traits<ggml_ext::traits<B>::type>; // the traits that mul_mat_vec_q uses
        float sum = 0;
        for (int64_t ib = 0; ib < n_blocks; ++ib) {
            for (int k = 0; k < U::qi/GGML_EXT_VDR_MMVQ; ++k) {
                sum += ggml_ext::vec_dot<B>(x, (const block_q8_1 *) y + U::qk/QK8_1*ib, (int) (ib0 + ib), GGML_EXT_VDR_MMVQ*k);
            }
        }
        return sum;
    });
}

// Quantize ne1*ne2*ne3 rows of ne00 floats, strides s01, s02 and s03, to rows of block_q8 for ne0 values.
void cuda_host_quantize(int type, const float * x, void * y, int64_t ne00, int64_t s01, int64_t s02, int64_t s03, int64_t ne0,
                        int64_t ne1, int64_t ne2, int64_t ne3) {
    ggml_ext::quantize_row_q8_cuda(x, y, (ggml_type) type, ne00, s01, s02, s03, ne0, ne1, ne2, ne3, nullptr);
}

// Dequantize n contiguous weights to F32, F16 or BF16.
void cuda_host_dequantize(int type, const void * x, void * y, int dst_type, int64_t n) {
    dispatch(type, [&](auto * tag) {
        dispatch_result(dst_type, y, [&](auto * out) { ggml_ext::dequantize_cuda<BLOCK_OF(tag)>(x, out, n, nullptr); });
    });
}

// ne: shape; s: strides of x in blocks
void cuda_host_dequantize_nc(int type, const void * x, void * y, int dst_type, const int64_t * ne, const int64_t * s) {
    dispatch(type, [&](auto * tag) {
        dispatch_result(dst_type, y, [&](auto * out) {
            ggml_ext::dequantize_nc_cuda<BLOCK_OF(tag)>(x, out, ne[0], ne[1], ne[2], ne[3], s[0], s[1], s[2], nullptr);
        });
    });
}

// nb0, nb1, nb: strides in bytes of dims 1 to 3 of x, 0 to 2 of ids, 1 to 3 of y; ne1: shape of ids
void cuda_host_get_rows(int type, const void * x, const int32_t * ids, void * y, int dst_type, int64_t ne00, const size_t * nb0,
                        const int64_t * ne1, const size_t * nb1, const size_t * nb) {
    dispatch(type, [&](auto * tag) {
        dispatch_result(dst_type, y, [&](auto * out) {
            ggml_ext::get_rows_cuda<BLOCK_OF(tag)>(x, ids, out, ne00, nb0[0], nb0[1], nb0[2], ne1[0], ne1[1], ne1[2], nb1[0],
                                                   nb1[1], nb1[2], nb[0], nb[1], nb[2], nullptr);
        });
    });
}

// Returns false if the backend does not support the copy.
bool cuda_host_copy(int type, const void * x, void * y, int dst_type, const int64_t * ne, const size_t * nb_x, const size_t * nb_y) {
    ggml_tensor src = {}, dst = {};
    src.type = (ggml_type) type;
    dst.type = (ggml_type) dst_type;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        src.ne[i] = dst.ne[i] = ne[i];
        src.nb[i] = nb_x[i];
        dst.nb[i] = nb_y[i];
    }
    src.data = (void *) x;
    dst.data = y;
    if (!ggml_ext::can_copy(&src, &dst)) {
        return false;
    }
    ggml_ext::copy_cuda(&src, &dst, nullptr);
    return true;
}

// Load 256 weights of 128 rows from block kbx0 on. stride: blocks per row; i_max: last row, for fallback.
void cuda_host_load_tiles(int type, const void * x, int32_t * tile, int kbx0, int i_max, int stride, bool mma, bool fallback) {
    dispatch(type, [&](auto * tag) {
        constexpr ggml_type T = ggml_ext::traits<BLOCK_OF(tag)>::type;
        const auto load = mma ? (fallback ? ggml_ext_mmq_load_tiles<T, 8, true, true>  : ggml_ext_mmq_load_tiles<T, 8, false, true>)
                              : (fallback ? ggml_ext_mmq_load_tiles<T, 8, true, false> : ggml_ext_mmq_load_tiles<T, 8, false, false>);
        cuda_host_launch(dim3(), dim3(32, 256/32), [&] { load((const char *) x, tile, kbx0, i_max, stride); });
    });
}

// Quantize the rows of x to block_q8_1_mmq. Returns false if upstream's kernel serves the type.
bool cuda_host_quantize_mmq(int type, const float * x, const int32_t * ids, void * y, int64_t ne00, int64_t s01, int64_t s02, int64_t s03,
                            int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    if (!ggml_ext::quantizes_for_mmq((ggml_type) type)) {
        return false;
    }
    ggml_ext::quantize_mmq_cuda<false>(x, ids, y, (ggml_type) type, ne00, s01, s02, s03, ne0, ne1, ne1, ne2, ne3, 0, nullptr);
    return true;
}

// The same, with each token's row in each of its n_used columns.
void cuda_host_quantize_scatter(int type, const float * x, const int32_t * ids, void * y, int64_t ne00, int64_t stride_token,
                                int64_t ne0, int64_t n_tokens, int64_t n_columns, int n_used) {
    ggml_ext::quantize_mmq_cuda<true>(x, ids, y, (ggml_type) type, ne00, 0, stride_token, 0, ne0, n_tokens, n_columns, 1, 1, n_used, nullptr);
}

// Split rows of x of shape ne, strides s, into pairs of rows at y. groups: a split_groups; y_strides: strides 1 to 3, and r.
void cuda_host_split(int type, int groups, const float * x, float * y, const int64_t * ne, const int64_t * s, const int64_t * y_strides) {
    ggml_ext::split_activations_cuda(x, y, (ggml_type) type, (ggml_ext::split_groups) groups, ne[0], s[0], s[1], s[2],
                                     {{0, y_strides[0], y_strides[1], y_strides[2]}, y_strides[3]}, ne[1], ne[2], ne[3], nullptr);
}

void cuda_host_add_residuals(const float * y, float * sum, const int64_t * ne, const int64_t * y_strides, const int64_t * s) {
    ggml_ext::add_residuals_cuda(y, sum, ne[0], {{0, y_strides[0], y_strides[1], y_strides[2]}, y_strides[3]}, s[0], s[1], s[2],
                                 ne[1], ne[2], ne[3], nullptr);
}

void cuda_host_double_ids(const int32_t * ids, int32_t * out, int64_t n_used, int64_t stride, int64_t n_tokens) {
    ggml_ext::double_ids_cuda(ids, out, n_used, stride, n_tokens, nullptr);
}

} // extern "C"
