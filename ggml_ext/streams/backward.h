// Gradients of a layer: given the gradient of its output, those of its products and of its input.
//
// ggml's own differentiation does not support attention to a cache, F16 weights or experts, and aborts at unknown operations. This one
// reports them. The choice of experts and their weights count as constants.
#pragma once

#include "layers.h"

#include "ggml-cpp.h"

#include <functional>

namespace ggml_ext {

class backward {
public:
    // find_transposed: returns the transposed matrix if it exists, else null.
    explicit backward(std::function<ggml_tensor *(const ggml_tensor *)> find_transposed = {}) : find_transposed(std::move(find_transposed)) {}

    // Build the gradients of a layer's nodes, given in graph order. Return false, with error(), if an operation is not supported.
    bool build(const std::vector<ggml_tensor *> & nodes, const layer & info);

    // Append the gradients to the graph.
    void append(ggml_cgraph * graph) const;

    const std::string & error() const { return message; }

    // The gradient of the last node, to be set before computing.
    ggml_tensor * seed() const { return seed_tensor; }

    // The gradient of a product or of the layer's input; null if nothing depends on it.
    ggml_tensor * gradient(const ggml_tensor * t) const;

private:
    // The keys or values that attention reads, as the layer has written them: [columns, tokens], of which it uses some.
    struct cached {
        ggml_tensor * data   = nullptr; // float32
        int64_t       n_data = 0, first = 0, n = 0; // columns of data, the first one and the number of those used
        bool          is_transposed = false;        // in the cache: values of attention without FLASH_ATTN_EXT
    };

    bool          differentiate(ggml_tensor * node);
    bool          differentiate_product(ggml_tensor * node, ggml_tensor * g);
    bool          differentiate_activations(ggml_tensor * node, ggml_tensor * g);
    bool          differentiate_streams(ggml_tensor * node, ggml_tensor * g);
    bool          differentiate_attention(ggml_tensor * node, ggml_tensor * g);
    bool          differentiate_rope(ggml_tensor * node, ggml_tensor * g);
    bool          differentiate_glu(ggml_tensor * node, ggml_tensor * g);
    ggml_tensor * differentiate_unary(ggml_unary_op op, ggml_tensor * x);
    cached        find_cached(ggml_tensor * t) const;
    ggml_tensor * take_columns(const cached & c);
    bool          add_to_columns(const cached & c, ggml_tensor * g);
    ggml_tensor * sum_matrices(ggml_tensor * t, int64_t n);
    ggml_tensor * bound(ggml_tensor * t, float min, float max);
    ggml_tensor * is_within(ggml_tensor * t, float min, float max);
    ggml_tensor * transpose(ggml_tensor * t);
    ggml_tensor * make_contiguous(ggml_tensor * t);
    ggml_tensor * scatter_view(ggml_tensor * g, ggml_tensor * in, const ggml_tensor * view);
    bool          add_gradient(ggml_tensor * t, ggml_tensor * g);
    bool          refuse(const ggml_tensor * node, const char * what = "");

    std::function<ggml_tensor *(const ggml_tensor *)>        find_transposed;
    ggml_context_ptr                                         owner;
    ggml_context *                                           ctx = nullptr;
    ggml_tensor *                                            seed_tensor = nullptr;
    std::set<const ggml_tensor *>                            active; // tensors that gradients flow through
    std::map<const ggml_tensor *, ggml_tensor *>             grads;
    std::map<const ggml_tensor *, ggml_tensor *>             written; // by cache: what this layer writes to it
    std::set<const ggml_tensor *>                            read;    // tensors that depend on such a cache
    std::string                                              message;
};

} // namespace ggml_ext
