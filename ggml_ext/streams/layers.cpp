#include "layers.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "../graph/views.h"
#include "ggml-backend.h"
#include "ggml-impl.h"

namespace ggml_ext {

bool is_weight(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool layered_graph::refuse(const char * format, ...) {
    char    text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    message = text;
    return false;
}

int layered_graph::position(const ggml_tensor * t) const {
    const auto it = positions.find(t);
    return it == positions.end() ? -1 : it->second;
}

bool is_product(const ggml_tensor * t) {
    return (t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID) && is_weight(t->src[0]);
}

// The tensor whose memory a tensor is in.
static const ggml_tensor * find_memory(const ggml_tensor * t) {
    return t->view_src ? find_memory(t->view_src) : t;
}

static bool writes_to_memory(const ggml_tensor * node) {
    return node->view_src && !is_view(node);
}

bool layered_graph::read(ggml_cgraph * source, int n_layers, int offset) {
    graph        = source;
    cache_offset = offset;
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        positions[node]    = i;
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            users[node->src[j]].push_back(node);
        }
    }
    std::vector<ggml_tensor *> ends(n_layers);
    if (!find_ends(ends)) {
        return false;
    }
    for (int k = 0; k <= n_layers; ++k) {
        layer info;
        info.start = k ? ends[k - 1] : nullptr;
        info.end   = k < n_layers ? ends[k] : nullptr;
        info.first = info.start ? position(info.start) + 1 : 0;
        info.last  = info.end ? position(info.end) + 1 : graph->n_nodes;
        if (info.end && ggml_nbytes(info.end) != ggml_nbytes(ends[0])) {
            return refuse("layers 0 and %d have outputs of different sizes", k);
        }
        if (!find_selections(info)) {
            return false;
        }
        layers_.push_back(info);
    }
    return true;
}

// Find the outputs of the layers.
bool layered_graph::find_ends(std::vector<ggml_tensor *> & ends) {
    const int        n_layers = (int) ends.size();
    std::vector<int> first_use(n_layers, graph->n_nodes), last_use(n_layers, -1), last_user(graph->n_nodes);
    std::map<const ggml_tensor *, int> writers; // by memory, such as a cache: the last node that writes to it, which no edge joins to readers
    computed.resize(graph->n_nodes);
    for (int i = 0, k = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node    = graph->nodes[i];
        bool                depends = is_product(node);
        const auto          use     = [&](int src) {
            last_user[src] = i;
            depends        = depends || computed[src];
        };
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            if (const int src = position(node->src[j]); src >= 0) {
                use(src);
            }
            if (const auto writer = writers.find(find_memory(node->src[j])); writer != writers.end()) {
                use(writer->second);
            }
        }
        if (writes_to_memory(node)) {
            writers[find_memory(node)] = i;
        }
        computed[i] = depends && node->type != GGML_TYPE_I32;
        for (int j = 0; depends && j < GGML_MAX_SRC && node->src[j]; ++j) { // what does not depend on products may come at any place
            int n = 0;
            if (is_weight(node->src[j]) && sscanf(node->src[j]->name, "blk.%d.", &n) == 1 && n >= 0 && n < n_layers) {
                if (n < k) {
                    return refuse("its graph uses %s again after weights of layer %d", node->src[j]->name, k);
                }
                k            = n;
                first_use[n] = std::min(first_use[n], i);
                last_use[n]  = i;
            }
        }
    }
    const auto missing = std::find(last_use.begin(), last_use.end(), -1);
    if (missing != last_use.end()) {
        return refuse("its graph has no weights of layer %d", (int) (missing - last_use.begin()));
    }
    if (ends.empty()) {
        return true;
    }
    int furthest = -1; // the last user of the computed nodes so far
    for (int i = 0, k = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        if (k + 1 < n_layers && i == first_use[k + 1]) {
            if (!ends[k]) {
                break;
            }
            ++k;
        }
        const bool is_norm     = node->op == GGML_OP_RMS_NORM || node->op == GGML_OP_NORM; // belongs to what follows
        const bool is_separate = node->type == GGML_TYPE_F32 && !node->view_src && ggml_is_contiguous(node) && !is_norm;
        const bool is_last     = k + 1 == n_layers; // takes the first such tensor, the others the last one before the next layer
        if (i >= last_use[k] && is_separate && computed[i] && furthest <= i && last_user[i] > i && !(is_last && ends[k])) {
            ends[k] = node;
        }
        if (computed[i]) {
            furthest = std::max(furthest, last_user[i]);
        }
    }
    const auto joined = std::find(ends.begin(), ends.end(), nullptr);
    return joined == ends.end() || refuse("layer %d of its graph is connected to what follows by more than one tensor", (int) (joined - ends.begin()));
}

// Find the selections of earlier layers that a layer uses.
bool layered_graph::find_selections(layer & info) {
    std::set<const ggml_tensor *> visited;
    std::vector<ggml_tensor *>    pending(graph->nodes + info.first, graph->nodes + info.last);
    while (!pending.empty()) {
        const ggml_tensor * node = pending.back();
        pending.pop_back();
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            ggml_tensor * src = node->src[j];
            const int     i   = position(src);
            if (i < 0 || i >= info.first || src == info.start || !visited.insert(src).second) {
                continue;
            }
            const bool is_selection = src->type == GGML_TYPE_I32 && std::any_of(src->src, src->src + GGML_MAX_SRC, [&](const ggml_tensor * t) {
                return position(t) >= 0 && computed[position(t)];
            });
            if (!is_selection) {
                pending.push_back(src);
                continue;
            }
            if (src->view_src || !ggml_is_contiguous(src)) {
                return refuse("%s, which a later layer uses, is not a separate tensor", src->name);
            }
            info.selections.push_back(src);
            if (std::find(selections_.begin(), selections_.end(), src) == selections_.end()) {
                selections_.push_back(src);
            }
        }
    }
    return true;
}

std::vector<ggml_tensor *> layered_graph::outputs(int k) const {
    const layer & info = layers_[k];
    std::vector<ggml_tensor *> result = { info.end };
    std::copy_if(selections_.begin(), selections_.end(), std::back_inserter(result),
                 [&](const ggml_tensor * t) { return position(t) >= info.first && position(t) < info.last; });
    return result;
}

bool layered_graph::check() {
    for (int k = 0; k < (int) layers_.size(); ++k) {
        std::set<int> indices;
        if (!collect_nodes(k, find_boundary(k, 0), nodes(k), indices)) {
            return false;
        }
    }
    return true;
}

// Collect the nodes that compute the targets, of layer k, from a boundary: the open nodes up to the last target, the targets, and what both
// need, also of nodes before the layer.
bool layered_graph::collect_nodes(int k, const boundary & start, const std::vector<ggml_tensor *> & targets, std::set<int> & nodes) {
    const layer & info     = layers_[k];
    const auto    is_known = [&](const ggml_tensor * t) {
        const auto has = [t](const std::vector<ggml_tensor *> & tensors) { return std::find(tensors.begin(), tensors.end(), t) != tensors.end(); };
        return t == info.start || has(info.selections) || has(start.values);
    };
    int last = 0;
    for (const ggml_tensor * t : targets) {
        last = std::max(last, position(t) + 1);
    }
    std::vector<int> pending;
    for (int i = info.first; i < last; ++i) {
        const ggml_tensor * node      = graph->nodes[i];
        const bool          is_target = std::find(targets.begin(), targets.end(), node) != targets.end();
        if (start.open.count(node) || (is_target && !is_known(node))) {
            nodes.insert(i);
            pending.push_back(i);
        }
    }
    while (!pending.empty()) {
        const ggml_tensor * node = graph->nodes[pending.back()];
        pending.pop_back();
        for (int j = 0; j <= GGML_MAX_SRC; ++j) {
            ggml_tensor * src = j < GGML_MAX_SRC ? node->src[j] : node->view_src;
            if (!src || is_known(src)) {
                continue;
            }
            int n = 0;
            if ((sscanf(src->name, "cache_k_l%d", &n) == 1 || sscanf(src->name, "cache_v_l%d", &n) == 1) && n != cache_offset + k) {
                return refuse("layer %d attends to the keys of layer %d", cache_offset + k, n);
            }
            const int index = position(src);
            if (index < 0 || nodes.count(index)) {
                continue;
            }
            if (k > 0 && is_product(src)) {
                return refuse("layer %d needs the product with %s of an earlier one", k, src->src[0]->name);
            }
            nodes.insert(index);
            pending.push_back(index);
        }
    }
    return true;
}

void layered_graph::find_groups(int k) {
    layer & info = layers_[k];
    for (int i = info.first; i < info.last; ++i) {
        ggml_tensor * node    = graph->nodes[i];
        const bool    experts = node->op == GGML_OP_MUL_MAT_ID;
        if ((node->op != GGML_OP_MUL_MAT && !experts) || !is_weight(node->src[0]) || node->src[1]->type != GGML_TYPE_F32 ||
            node->src[1]->nb[0] != sizeof(float) || (!experts && node->src[0]->ne[2] * node->src[0]->ne[3] != 1)) {
            continue;
        }
        ggml_tensor * ids  = experts ? node->src[2] : nullptr;
        const auto    same = [&](const group & g) { return g.x == node->src[1] && g.ids == ids; };
        auto          g    = std::find_if(info.groups.begin(), info.groups.end(), same);
        if (g == info.groups.end()) {
            g = info.groups.insert(g, { node->src[1], ids, {} });
        }
        product p;
        p.node = node;
        if (!experts) {
            find_residual(p, info, g->x);
        }
        g->products.push_back(p);
    }
}

// Follow a product to the sum it is added to: through biases, factors and selections of all rows.
void layered_graph::find_residual(product & p, const layer & info, const ggml_tensor * x) {
    const ggml_tensor * node = p.node;
    float               scale = 1.0f;
    for (auto next = users.find(node); next != users.end() && next->second.size() == 1; next = users.find(node)) {
        const ggml_tensor * user = next->second[0];
        if (user->op == GGML_OP_SCALE && ggml_get_op_params_f32(user, 1) == 0.0f) {
            scale *= ggml_get_op_params_f32(user, 0);
        } else if (user->op == GGML_OP_ADD) {
            ggml_tensor * other = user->src[user->src[0] == node ? 1 : 0];
            if (!is_weight(other)) {
                while (other->op == GGML_OP_GET_ROWS && position(other->src[1]) < 0 && !is_weight(other->src[0])) {
                    other = other->src[0];
                }
                const bool is_before = other == info.start || (position(other) >= 0 && position(other) < position(x));
                if (is_before && ggml_is_contiguous(other) && other->type == GGML_TYPE_F32 && other->ne[0] == p.node->ne[0] && scale) {
                    p.residual = other;
                    p.scale    = scale;
                }
                return;
            }
        } else if (user->op != GGML_OP_RESHAPE && !(user->op == GGML_OP_GET_ROWS && user->src[0] == node && position(user->src[1]) < 0)) {
            return;
        }
        node = user;
    }
}

std::vector<const ggml_tensor *> layered_graph::embeddings() const {
    std::vector<const ggml_tensor *> out;
    for (int i = 0; i < layers_[0].last; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_GET_ROWS && is_weight(node->src[0])) {
            out.push_back(node->src[0]);
        }
    }
    return out;
}

std::vector<ggml_tensor *> layered_graph::nodes(int k) const {
    return { graph->nodes + layers_[k].first, graph->nodes + layers_[k].last };
}

void keep_value(ggml_tensor * t) {
    ggml_set_output(t); // no other tensor reuses its memory
    if (t->view_src) {
        ggml_set_output(t->view_src);
    }
}

void copy_rows(const ggml_tensor * t, void * dst) {
    if (ggml_is_contiguous(t)) {
        ggml_backend_tensor_get(t, dst, 0, ggml_nbytes(t));
        return;
    }
    std::vector<char> data(ggml_nbytes(t));
    ggml_backend_tensor_get(t, data.data(), 0, data.size());
    const size_t row_bytes = ggml_row_size(t->type, t->ne[0]);
    for (int64_t i = 0; i < ggml_nrows(t); ++i) {
        const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / t->ne[1] / t->ne[2];
        memcpy((char *) dst + i*row_bytes, data.data() + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3], row_bytes);
    }
}

// The position after the last input and residual of groups 0 .. g. The first product of group g is behind it.
int layered_graph::end_of_inputs(int k, int g) const {
    int last = 0;
    for (int i = 0; i <= g; ++i) {
        const group & inputs = layers_[k].groups[i];
        last = std::max({ last, position(inputs.x), inputs.ids ? position(inputs.ids) : 0 });
        for (const product & p : inputs.products) {
            last = std::max(last, p.residual ? position(p.residual) : 0);
        }
    }
    return last + 1;
}

// Find the nodes of layer k that remain to be computed when the inputs of group g are known. These are all nodes behind the inputs, and earlier
// nodes that share written memory, such as a cache, with them: only the order of nodes, no edge, puts the write before the read.
std::set<const ggml_tensor *> layered_graph::find_open_nodes(int k, int g) const {
    const layer & info = layers_[k];
    const int     end  = g == 0 ? info.first : end_of_inputs(k, g);
    std::set<const ggml_tensor *> open, written, shared;
    const auto each_memory = [](const ggml_tensor * node, const auto & f) {
        f(find_memory(node));
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            f(find_memory(node->src[j]));
        }
    };
    for (int i = info.first; i < info.last; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (writes_to_memory(node)) {
            written.insert(find_memory(node));
        }
        if (i >= end) {
            open.insert(node);
            each_memory(node, [&](const ggml_tensor * t) { shared.insert(t); });
        }
    }
    for (int i = info.first; i < end; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        each_memory(node, [&](const ggml_tensor * t) {
            if (!is_view(node) && written.count(t) && shared.count(t)) {
                open.insert(node);
            }
        });
    }
    return open;
}

boundary layered_graph::find_boundary(int k, int g) const {
    const layer & info = layers_[k];
    boundary      result;
    result.open = find_open_nodes(k, g);
    if (g == 0) {
        return result;
    }
    std::set<int> known;
    const auto    add = [&](const ggml_tensor * t) {
        const ggml_tensor * value = skip_views(t);
        const int           i     = position(value);
        if (i >= info.first && value != info.start && !result.open.count(value)) {
            known.insert(i);
        }
    };
    for (const ggml_tensor * node : result.open) {
        std::for_each(node->src, node->src + GGML_MAX_SRC, add);
    }
    for (size_t i = g; i < info.groups.size(); ++i) { // what is asked of these groups; its users may be others
        add(info.groups[i].x);
        add(info.groups[i].ids);
        for (const product & p : info.groups[i].products) {
            add(p.residual);
        }
    }
    if (info.end) {
        const auto kept = outputs(k);
        std::for_each(kept.begin(), kept.end(), add);
    }
    std::transform(known.begin(), known.end(), std::back_inserter(result.values), [&](int i) { return graph->nodes[i]; });
    return result;
}

void layered_graph::make_input(ggml_tensor * t) {
    t->op = GGML_OP_NONE;
    std::fill(t->src, t->src + GGML_MAX_SRC, nullptr);
    ggml_set_input(t);
    GGML_ASSERT(!t->view_src && graph->n_leafs < graph->size);
    graph->leafs[graph->n_leafs++] = t;
}

std::pair<int, int> layered_graph::size() const {
    return { graph->n_nodes, graph->n_leafs };
}

bool layered_graph::cut(int k, const boundary & start, const std::vector<ggml_tensor *> & targets,
                        const std::map<std::string, ggml_tensor *> & weights) {
    std::set<int> nodes;
    if (k >= 0 && !collect_nodes(k, start, targets, nodes)) {
        return false;
    }
    std::for_each(targets.begin(), targets.end(), keep_value);
    int n = 0;
    for (const int i : nodes) {
        ggml_tensor * node = graph->nodes[n++] = graph->nodes[i];
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            const auto replacement = weights.find(node->src[j]->name);
            if (replacement != weights.end() && is_weight(node->src[j])) {
                node->src[j] = replacement->second;
            }
        }
    }
    graph->n_nodes = n;
    for (int i = 0; i < graph->n_leafs; ++i) { // some leafs lose all users, from which the scheduler would choose their backend
        if (!graph->leafs[i]->buffer && !graph->leafs[i]->view_src) {
            ggml_set_input(graph->leafs[i]);
        }
    }
    std::for_each(start.values.begin(), start.values.end(), [this](ggml_tensor * t) { make_input(t); });
    if (k > 0) {
        make_input(layers_[k].start);
        std::for_each(layers_[k].selections.begin(), layers_[k].selections.end(), [this](ggml_tensor * t) { make_input(t); });
    }
    return true;
}

} // namespace ggml_ext
