// A model's graph as a sequence of layers: their nodes, their products with weights, and the subgraph that computes tensors of a layer from
// its input.
//
// The output of layer N is a tensor between the uses of the weights blk.N.* and of the next layer's through which everything behind it depends
// on products with weights. Other inputs of a layer (positions, masks) are recomputed from the graph's inputs. A layer may also use selections of an
// earlier one, integers such as the keys to attend to. One that needs any other tensor of an earlier layer cannot be cut.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace ggml_ext {

bool is_weight(const ggml_tensor * t);

// Whether a node multiplies with a matrix of weights, or with those of experts.
bool is_product(const ggml_tensor * t);

// Keep the value of a tensor until the graph has been computed.
void keep_value(ggml_tensor * t);

// Copy a tensor's values without the gaps between its rows.
void copy_rows(const ggml_tensor * t, void * dst);

// A product of an input with a weight matrix, or with the matrices of experts.
struct product {
    ggml_tensor * node     = nullptr;
    ggml_tensor * residual = nullptr; // the tensor it is added to, times 1/scale; null if it has none, or none before its input
    float         scale    = 1.0f;    // factor before the addition

    std::string weight() const { return node->src[0]->name; }
};

// Products with a common input, in graph order.
struct group {
    ggml_tensor *        x   = nullptr; // [columns, tokens]; of experts [columns, 1 or used, tokens]
    ggml_tensor *        ids = nullptr; // of experts: [used, tokens]
    std::vector<product> products;
};

// Nodes first .. last - 1 of the graph.
struct layer {
    int                first = 0, last = 0;
    ggml_tensor *      start = nullptr, * end = nullptr; // input, null for the first layer; output, null for the last one
    std::vector<ggml_tensor *> selections; // of earlier layers, which this one uses
    std::vector<group> groups;
};

// The state of a layer when the inputs of a group of products are known.
struct boundary {
    std::set<const ggml_tensor *> open;   // nodes to compute: all behind the inputs, and some before them
    std::vector<ggml_tensor *>    values; // what this needs besides the layer's input; a view is represented by the tensor that it views
};

class layered_graph {
public:
    // Split a graph into n_layers layers, plus one for what follows them, the output matrix. Groups stay empty. cache_offset: the number that
    // the caches have for layer 0. Return false, with error(), if the graph does not consist of layers.
    bool read(ggml_cgraph * graph, int n_layers, int cache_offset = 0);

    // Check that all layers can be cut, once per model, as all its graphs are alike. Return false, with error(), if not.
    bool check();

    // Find the groups of layer k.
    void find_groups(int k);

    const std::vector<layer> & layers() const { return layers_; }

    // The selections of all layers that later layers use.
    const std::vector<ggml_tensor *> & selections() const { return selections_; }

    // The output of layer k, and its selections that later layers use.
    std::vector<ggml_tensor *> outputs(int k) const;

    const std::string &        error() const { return message; }

    // The matrices that the first layer looks rows up in: token embeddings.
    std::vector<const ggml_tensor *> embeddings() const;

    // Find the boundary at the inputs of group g of layer k. Group 0: at the layer's input, where all nodes are open and no value is needed.
    boundary find_boundary(int k, int g) const;

    // The number of nodes and of leafs that remain after cut().
    std::pair<int, int> size() const;

    // Make a tensor an input of the graph.
    void make_input(ggml_tensor * t);

    // The nodes of layer k, in the order of the original graph.
    std::vector<ggml_tensor *> nodes(int k) const;

    // Reduce the graph to what `targets`, tensors of layer k, need. Make the layer's input and the values of `start` inputs of the graph.
    // weights: by name, replacing the model's own. k < 0: remove all nodes.
    bool cut(int k, const boundary & start, const std::vector<ggml_tensor *> & targets, const std::map<std::string, ggml_tensor *> & weights);

private:
    bool find_ends(std::vector<ggml_tensor *> & ends);
    bool find_selections(layer & info);
    int  end_of_inputs(int k, int g) const;
    std::set<const ggml_tensor *> find_open_nodes(int k, int g) const;
    bool collect_nodes(int k, const boundary & start, const std::vector<ggml_tensor *> & targets, std::set<int> & nodes);
    void find_residual(product & p, const layer & info, const ggml_tensor * x);
    int  position(const ggml_tensor * t) const;
    bool refuse(const char * format, ...);

    ggml_cgraph *                                graph = nullptr;
    int                                          cache_offset = 0;
    std::unordered_map<const ggml_tensor *, int> positions;
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> users;
    std::vector<bool>                            computed; // by node: whether it depends on a product with weights, selections aside
    std::vector<layer>                           layers_;
    std::vector<ggml_tensor *>                   selections_;
    std::string                                  message;
};

} // namespace ggml_ext
