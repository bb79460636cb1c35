// Entry points of everything in cuda/ except products: dequantization, get_rows, and activations split into two columns.
#include "host.h"
#include "ggml-cuda/mmq.cuh"
#include "cuda/dequantize.cuh"
#include "cuda/split.cuh"

#include <type_traits>

// Call f(null pointer to a block of the type, pointer to results of the type).
template <typename F> static void dispatch(int type, int dst_type, void * y, F f) {
    const auto result = [&](auto * block) {
        switch (dst_type) {
            case GGML_TYPE_F32:  return f(block, (float *) y);
            case GGML_TYPE_F16:  return f(block, (half *) y);
            case GGML_TYPE_BF16: return f(block, (nv_bfloat16 *) y);
            default: GGML_ABORT("type %d is not a result type", dst_type);
        }
    };
    switch (type) {
#define CASE(NAME, name) case GGML_TYPE_##NAME: return result((const block_##name *) nullptr);
        GGML_EXT_WEIGHT_TYPES(CASE)
#undef CASE
        default: GGML_ABORT("type %d is not a weight type", type);
    }
}
#define BLOCK_OF(block) std::remove_const_t<std::remove_pointer_t<decltype(block)>>

extern "C" {

void ptx_device(int id, int, int, size_t) { ptx_device_id = id; }

// Dequantize n contiguous weights.
int ptx_dequantize(int type, const void * x, void * y, int dst_type, int64_t n) {
    return checked([&] {
        dispatch(type, dst_type, y, [&](auto * block, auto * out) { ggml_ext::dequantize_cuda<BLOCK_OF(block)>(x, out, n, nullptr); });
    });
}

// Dequantize n_ids rows of ne00 weights (nb01 bytes) by index.
int ptx_get_rows(int type, const void * x, const int32_t * ids, void * y, int dst_type, int64_t ne00, size_t nb01, int64_t n_ids) {
    return checked([&] {
        dispatch(type, dst_type, y, [&](auto * block, auto * out) {
            const size_t row = ne00*sizeof(*out);
            ggml_ext::get_rows_cuda<BLOCK_OF(block)>(x, ids, out, ne00, nb01, 0, 0, n_ids, 1, 1, 4, 4*n_ids, 4*n_ids, row, row*n_ids, row*n_ids,
                                                     nullptr);
        });
    });
}

// Split n rows of ne00 floats into a rounded row and a row of residuals each.
int ptx_split(int type, int groups, const float * x, float * y, int64_t ne00, int64_t n) {
    return checked([&] {
        const ggml_ext::pair_strides to = {{0, 2*ne00, 2*ne00*n, 2*ne00*n}, ne00};
        ggml_ext::split_activations_cuda(x, y, (ggml_type) type, (ggml_ext::split_groups) groups, ne00, ne00, ne00*n, ne00*n, to, n, 1, 1, nullptr);
    });
}

// Add n pairs of rows of ne0 results.
int ptx_add_residuals(const float * y, float * sum, int64_t ne0, int64_t n) {
    return checked([&] {
        const ggml_ext::pair_strides from = {{0, 2*ne0, 2*ne0*n, 2*ne0*n}, ne0};
        ggml_ext::add_residuals_cuda(y, sum, ne0, from, ne0, ne0*n, ne0*n, n, 1, 1, nullptr);
    });
}

int ptx_double_ids(const int32_t * ids, int32_t * out, int64_t n_used, int64_t n_tokens) {
    return checked([&] { ggml_ext::double_ids_cuda(ids, out, n_used, n_used, n_tokens, nullptr); });
}

}
