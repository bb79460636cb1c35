// A model's graph as layers: which nodes one has, which products with weights, and the part of the graph that gives some of its tensors
// from the stream before the layer.
//
// The stream is the tensor l_out-N, which almost every model's graph names after its layer N. What a layer needs but the stream (positions,
// masks) is computed from the graph's inputs again; a layer that needs anything else of an earlier one cannot be cut.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace ggml_ext {

bool is_weight(const ggml_tensor * t);

// Its value is there once the graph has been computed.
void keep(ggml_tensor * t);

// A tensor's values, without the gaps between its rows.
void get_rows(const ggml_tensor * t, void * to);

// A product of a weight matrix, or of the matrices of experts, with an input.
struct product {
    ggml_tensor * node     = nullptr;
    ggml_tensor * residual = nullptr; // what the product is added to, times 1/scale; null where it is not, or not before the input is there
    float         scale    = 1.0f;    // of the product, before it is added

    std::string weight() const { return node->src[0]->name; }
};

// Products with one input, in the order of the graph.
struct group {
    ggml_tensor *        x   = nullptr; // [columns, tokens], of experts [columns, 1 or used, tokens]
    ggml_tensor *        ids = nullptr; // of experts: [used, tokens]
    std::vector<product> products;
};

// Positions in the graph: nodes first .. last - 1. start: the stream before it, null for the first layer.
struct layer {
    int                first = 0, last = 0;
    ggml_tensor *      start = nullptr, * end = nullptr; // end: the stream behind it, null behind the last layer
    std::vector<group> groups;
};

class layered_graph {
public:
    // n_layers: of the model. What lies behind the last of them, the output matrix, is one layer more. False, with why(), if the graph
    // is not made of layers. Their groups are not known then.
    bool read(ggml_cgraph * graph, int n_layers);

    // Whether all layers can be cut: once for a model, whose graphs are alike. False with why().
    bool check();

    // Finds the groups of layer k.
    void find_groups(int k);

    const std::vector<layer> & layers() const { return found; }
    const std::string &        why() const { return reason; }

    // What the first layer takes rows of by index: token embeddings.
    std::vector<const ggml_tensor *> embeddings() const;

    // Of layer k, in the order of the graph as it was read.
    std::vector<ggml_tensor *> nodes(int k) const;

    // Leaves of the graph what is needed for the targets, tensors of layer k, and makes the stream before it an input, with no value yet.
    // weights: by name, in place of those of the model. k < 0: leaves nothing.
    bool cut(int k, const std::vector<ggml_tensor *> & targets, const std::map<std::string, ggml_tensor *> & weights);

private:
    bool needs(int k, int last, std::set<int> & nodes);
    void find_residual(product & p, const layer & of, const ggml_tensor * x);
    int  position(const ggml_tensor * t) const;
    bool refuse(const char * format, ...);

    ggml_cgraph *                                graph = nullptr;
    std::unordered_map<const ggml_tensor *, int> positions;
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> users;
    std::vector<layer>                           found;
    std::string                                  reason;
};

} // namespace ggml_ext
