// Gradients of a layer: from that of the stream behind it, those of its products and of the stream before it.
//
// ggml can differentiate graphs itself, but not through attention to a cache, F16 weights or experts, and ends the program at an operation
// that it does not know. Here one is refused by name. What chooses experts, and how much they count, is taken as fixed.
#pragma once

#include "layers.h"

#include "ggml-cpp.h"

namespace ggml_ext {

class backward {
public:
    // nodes: of a layer, in the order of the graph. False, with why(), if it cannot be differentiated.
    bool build(const std::vector<ggml_tensor *> & nodes, const layer & of);

    // Puts what build() made behind the graph's nodes.
    void append(ggml_cgraph * graph) const;

    const std::string & why() const { return reason; }

    // To be given: the gradient of the last node.
    ggml_tensor * seed() const { return first; }

    // Of a product or the stream before the layer; null where nothing depends on it.
    ggml_tensor * of(const ggml_tensor * t) const;

private:
    bool          step(ggml_tensor * node);
    bool          product(ggml_tensor * node, ggml_tensor * g);
    bool          attention(ggml_tensor * node, ggml_tensor * g);
    bool          rope(ggml_tensor * node, ggml_tensor * g);
    bool          gated(ggml_tensor * node, ggml_tensor * g);
    ggml_tensor * slope(ggml_unary_op op, ggml_tensor * x);
    ggml_tensor * cached(const ggml_tensor * t) const;
    ggml_tensor * transposed(ggml_tensor * t);
    ggml_tensor * contiguous(ggml_tensor * t);
    ggml_tensor * placed(ggml_tensor * g, ggml_tensor * in, const ggml_tensor * view);
    bool          add(ggml_tensor * t, ggml_tensor * g);
    bool          refuse(const ggml_tensor * node, const char * what = "");

    ggml_context_ptr                                         owner;
    ggml_context *                                           ctx = nullptr;
    ggml_tensor *                                            first = nullptr;
    std::set<const ggml_tensor *>                            active; // what gradients are of
    std::map<const ggml_tensor *, ggml_tensor *>             grads;
    std::map<const ggml_tensor *, ggml_tensor *>             written; // by cache: what this layer puts into it
    std::string                                              reason;
};

} // namespace ggml_ext
