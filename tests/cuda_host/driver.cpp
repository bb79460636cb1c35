// The device code of cuda/ as a library that Python loads: see common.cuh.
#include "cuda/dequantize.cuh"
#include "cuda/mmq.cuh"
#include "cuda/mmvq.cuh"
#include "cuda/quantize.cuh"
#include "cuda/split.cuh"

#include <type_traits>

// f(a null pointer to a block of the type)
template <typename F> static auto dispatch(int type, F f) {
    switch (type) {
#define CASE(NAME, name) case GGML_TYPE_##NAME: return f((const block_##name *) nullptr);
        GGML_EXT_WEIGHT_TYPES(CASE)
#undef CASE
        default: GGML_ABORT("type %d is not a type of weights", type);
    }
}
#define BLOCK_OF(tag) std::remove_const_t<std::remove_pointer_t<decltype(tag)>>

template <typename F> static void dispatch_result(int type, void * y, F f) {
    switch (type) {
        case GGML_TYPE_F32:  return f((float *) y);
        case GGML_TYPE_F16:  return f((half *) y);
        case GGML_TYPE_BF16: return f((nv_bfloat16 *) y);
        default: GGML_ABORT("type %d is not a type of results", type);
    }
}

extern "C" {

uint32_t cuda_host_byte_perm(uint32_t lo, uint32_t hi, uint32_t s) { return __byte_perm(lo, hi, s); }
uint32_t cuda_host_prmt(uint32_t lo, uint32_t hi, uint32_t s) { return ggml_ext::prmt(lo, hi, s); }

// As ggml_ext_unpack_block().
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

// Product of a row with a row of block_q8. The row begins with block ib0 of x, as kernels count.
float cuda_host_vec_dot(int type, const void * x, int64_t ib0, const void * y, int64_t n_blocks) {
    return dispatch(type, [&](auto * tag) {
        using B = BLOCK_OF(tag);
        using U = ggml_cuda_type_traits<ggml_ext::traits<B>::type>; // what upstream knows: mul_mat_vec_q
        float sum = 0;
        for (int64_t ib = 0; ib < n_blocks; ++ib) {
            for (int k = 0; k < U::qi/GGML_EXT_VDR_MMVQ; ++k) {
                sum += ggml_ext::vec_dot<B>(x, (const block_q8_1 *) y + U::qk/QK8_1*ib, (int) (ib0 + ib), GGML_EXT_VDR_MMVQ*k);
            }
        }
        return sum;
    });
}

// Rows of ne00 floats, stride s01, into rows of block_q8 for ne0 values: ne1 of them, ne2 times with stride s02, ne3 with s03.
void cuda_host_quantize(int type, const float * x, void * y, int64_t ne00, int64_t s01, int64_t s02, int64_t s03, int64_t ne0,
                        int64_t ne1, int64_t ne2, int64_t ne3) {
    ggml_ext::quantize_row_q8_cuda(x, y, (ggml_type) type, ne00, s01, s02, s03, ne0, ne1, ne2, ne3, nullptr);
}

// n contiguous weights to F32, F16 or BF16
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

// false if the backend says that it has no such copy
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

// Fills a tile of 128 rows with 256 weights from block kbx0 on, of rows that are `stride` blocks apart, the last one i_max where that matters.
void cuda_host_load_tiles(int type, const void * x, int32_t * tile, int kbx0, int i_max, int stride, bool mma, bool fallback) {
    dispatch(type, [&](auto * tag) {
        constexpr ggml_type T = ggml_ext::traits<BLOCK_OF(tag)>::type;
        const auto load = mma ? (fallback ? ggml_ext_mmq_load_tiles<T, 8, true, true>  : ggml_ext_mmq_load_tiles<T, 8, false, true>)
                              : (fallback ? ggml_ext_mmq_load_tiles<T, 8, true, false> : ggml_ext_mmq_load_tiles<T, 8, false, false>);
        cuda_host_launch(dim3(), dim3(32, 256/32), [&] { load((const char *) x, tile, kbx0, i_max, stride); });
    });
}

// block_q8_1_mmq of the rows of x for a rotated type; false if upstream's kernel serves the type. ids as the kernel takes them.
bool cuda_host_quantize_mmq(int type, const float * x, const int32_t * ids, void * y, int64_t ne00, int64_t s01, int64_t s02, int64_t s03,
                            int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    if (!ggml_ext::quantizes_for_mmq((ggml_type) type)) {
        return false;
    }
    ggml_ext::quantize_mmq_cuda<false>(x, ids, y, (ggml_type) type, ne00, s01, s02, s03, ne0, ne1, ne1, ne2, ne3, 0, nullptr);
    return true;
}

// The same, a token's row to each of its n_used columns
void cuda_host_quantize_scatter(int type, const float * x, const int32_t * ids, void * y, int64_t ne00, int64_t stride_token,
                                int64_t ne0, int64_t n_tokens, int64_t n_columns, int n_used) {
    ggml_ext::quantize_mmq_cuda<true>(x, ids, y, (ggml_type) type, ne00, 0, stride_token, 0, ne0, n_tokens, n_columns, 1, 1, n_used, nullptr);
}

// Rows of x (ne[1], ne[2], ne[3] of ne[0], strides s in floats) to pairs of rows at y; groups: of split.cuh; to: strides 1 to 3 and r.
void cuda_host_split(int type, int groups, const float * x, float * y, const int64_t * ne, const int64_t * s, const int64_t * to) {
    ggml_ext::split_activations_cuda(x, y, (ggml_type) type, (ggml_ext::split_groups) groups, ne[0], s[0], s[1], s[2],
                                     {{0, to[0], to[1], to[2]}, to[3]}, ne[1], ne[2], ne[3], nullptr);
}

void cuda_host_add_residuals(const float * y, float * sum, const int64_t * ne, const int64_t * from, const int64_t * s) {
    ggml_ext::add_residuals_cuda(y, sum, ne[0], {{0, from[0], from[1], from[2]}, from[3]}, s[0], s[1], s[2], ne[1], ne[2], ne[3], nullptr);
}

void cuda_host_double_ids(const int32_t * ids, int32_t * out, int64_t n_used, int64_t stride, int64_t n_tokens) {
    ggml_ext::double_ids_cuda(ids, out, n_used, stride, n_tokens, nullptr);
}

} // extern "C"
