// The gradients of the original model (stream-pair.h).
#include "stream-pair.h"

#include "labels.h"

#include <algorithm>
#include <cstring>

namespace ggml_ext {

// Return why a layer of the full graph cannot be differentiated, or nothing.
std::string stream_pair::find_gradient_error() {
    for (size_t k = 0; k < parts.layers().size(); ++k) {
        backward trial;
        if (!trial.build(parts.nodes((int) k), parts.layers()[k])) {
            return trial.error();
        }
    }
    return {};
}

void stream_pair::allocate_gradients(int n) {
    check_index("number of chunks", n, n_chunks + 1);
    outputs     = n ? mapping(file, (size_t) n * n_layers * chunk_bytes / 2, true) : mapping();
    transposed  = {};
    n_gradients = n;
}

// The output of layer k in BF16; once layer k + 1 is differentiated, its gradient.
ggml_bf16_t * stream_pair::output_data(int k, int chunk) const {
    return (ggml_bf16_t *) (outputs.data() + ((size_t) k * n_gradients + chunk) * chunk_bytes / 2);
}

// Store the gradient of the input of the current layer.
void stream_pair::store_input_gradient(int chunk) {
    seed.resize(chunk_bytes / sizeof(float));
    ggml_backend_tensor_get(back.gradient(parts.layers()[layer].start), seed.data(), 0, chunk_bytes);
    ggml_fp32_to_bf16_row(seed.data(), output_data(layer - 1, chunk), (int64_t) seed.size());
}

void stream_pair::begin_gradients(int chunk) {
    check_index("chunk", chunk, n_gradients);
    run_purpose = purpose::full;
    compute(chunk, ORIGINAL);
    std::vector<float> hidden(chunk_bytes / sizeof(float));
    for (int k = 0; k < n_layers; ++k) {
        ggml_backend_tensor_get(parts.layers()[k].end, hidden.data(), 0, chunk_bytes);
        check_finite(chunk, k, hidden.data());
        ggml_fp32_to_bf16_row(hidden.data(), output_data(k, chunk), (int64_t) hidden.size());
    }
    store_selections(parts.selections());
    const ggml_tensor * logits = parts.nodes(n_layers).back();
    seed.resize(ggml_nelements(logits));
    ggml_backend_tensor_get(logits, seed.data(), 0, ggml_nbytes(logits));
    if (std::any_of(seed.begin(), seed.end(), is_overflow)) {
        fail_not_finite(chunk, "the output");
    }
    differentiate_logits(seed.data(), logits->ne[0], n_context, (uint64_t) chunk * n_context);
    run_purpose = purpose::gradients;
    layer       = n_layers;
    layer_input = hidden.data();
    compute(chunk, ORIGINAL);
    store_input_gradient(chunk);
    layer = 0;
}

void stream_pair::export_gradients(int chunk) {
    check_index("layer", layer, n_layers);
    check_index("chunk", chunk, n_gradients);
    const int64_t n = (int64_t) (chunk_bytes / sizeof(float));
    std::vector<float> input(n);
    seed.resize(n);
    ggml_bf16_to_fp32_row(output_data(layer, chunk), seed.data(), n);
    if (layer > 0) {
        ggml_bf16_to_fp32_row(output_data(layer - 1, chunk), input.data(), n);
    }
    layer_input = input.data();
    run_purpose = purpose::gradients;
    compute(chunk, ORIGINAL);
    char * dst = exchange.data();
    for (const auto & g : parts.layers()[layer].groups) {
        for (const auto & p : g.products) {
            if (g.ids) {
                continue;
            }
            const size_t n_bytes = (size_t) ggml_nelements(p.node) * sizeof(float);
            if (dst + n_bytes > exchange.data() + exchange.size()) {
                fail("the exchange is too small");
            }
            if (const ggml_tensor * gradient = back.gradient(p.node)) {
                copy_rows(gradient, dst);
            } else {
                memset(dst, 0, n_bytes);
            }
            dst += n_bytes;
        }
    }
    if (layer > 0) {
        store_input_gradient(chunk);
    }
}

} // namespace ggml_ext
