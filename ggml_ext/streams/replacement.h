#pragma once

#include "mapping.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <fstream>
#include <vector>

namespace ggml_ext {

// A matrix that replaces one of the model's on the same device.
struct replacement {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           tensor = nullptr;
    int                     layer = 0;

    // is_transposed: rows and columns are exchanged.
    replacement(const ggml_tensor * original, ggml_type type, int layer, bool is_transposed = false) : layer(layer) {
        ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        tensor = ggml_new_tensor_4d(ctx.get(), type, original->ne[is_transposed], original->ne[!is_transposed], original->ne[2], original->ne[3]);
        ggml_set_name(tensor, original->name);
        ggml_backend_buffer_type_t buffer_type = ggml_backend_buffer_get_type(original->buffer);
        const ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
        if (!device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            buffer_type = ggml_backend_cpu_buffer_type(); // neither the file's mapping nor AMX buffers, which take only some types
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buffer_type));
        if (!buffer) {
            fail(std::string("no memory for ") + original->name);
        }
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }

    // Read the values from a file.
    void read(const std::string & path) {
        std::ifstream file(path, std::ios::binary);
        std::vector<char> data(ggml_nbytes(tensor));
        if (!file.read(data.data(), (std::streamsize) data.size())) {
            fail(path + " is shorter than " + tensor->name);
        }
        ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
    }

    // Round the values of a matrix in F16 to BF16, the type of this one. Both are in the memory of the CPU.
    void round_from(const ggml_tensor * original) {
        const int64_t n = original->ne[0];
        std::vector<float> row(n);
        for (int64_t i = 0; i < ggml_nrows(original); ++i) {
            ggml_fp16_to_fp32_row((const ggml_fp16_t *) original->data + i*n, row.data(), n);
            ggml_fp32_to_bf16_row(row.data(), (ggml_bf16_t *) tensor->data + i*n, n);
        }
    }

    // Copy a matrix of 16-bit values, transposed. Both are in the memory of the CPU.
    void transpose_from(const ggml_tensor * original) {
        constexpr int64_t TILE = 64;
        const int64_t n = original->ne[0], n_rows = original->ne[1];
        const auto * src = (const uint16_t *) original->data;
        auto *       dst = (uint16_t *) tensor->data;
        for (int64_t i0 = 0; i0 < n_rows; i0 += TILE) {
            for (int64_t j0 = 0; j0 < n; j0 += TILE) {
                for (int64_t j = j0; j < std::min(n, j0 + TILE); ++j) {
                    for (int64_t i = i0; i < std::min(n_rows, i0 + TILE); ++i) {
                        dst[j*n_rows + i] = src[i*n + j];
                    }
                }
            }
        }
    }
};

} // namespace ggml_ext
