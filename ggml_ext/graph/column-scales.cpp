#include "column-scales.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

namespace ggml_ext {

namespace {

bool is_product(const ggml_tensor * t) { return t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID; }

bool is_leaf(const ggml_tensor * t) { return t && t->op == GGML_OP_NONE && !(t->flags & GGML_TENSOR_FLAG_INPUT); }

bool is_vector(const ggml_tensor * t, int64_t n) { return is_leaf(t) && t->ne[0] == n && ggml_nelements(t) == n; }

// Whether the columns of a tensor are those of its first source.
bool keeps_columns(const ggml_tensor * t) {
    const bool moves_rows = t->op == GGML_OP_RESHAPE || t->op == GGML_OP_CONT || t->op == GGML_OP_GET_ROWS ||
                            (t->op == GGML_OP_VIEW && t->view_offs == 0 && ggml_nelements(t) == ggml_nelements(t->src[0]));
    const bool is_factor = t->op == GGML_OP_SCALE && ggml_get_op_params_f32(t, 1) == 0.0f;
    return is_factor || (moves_rows && !is_leaf(t->src[0]) && t->ne[0] == t->src[0]->ne[0]);
}

// Whether a gated unit is linear in its second source.
bool is_linear_gate(const ggml_tensor * t) {
    return t->op == GGML_OP_GLU && t->src[1] && ggml_get_glu_op(t) != GGML_GLU_OP_SWIGLU_OAI && ggml_get_op_params_f32(t, 2) == 0.0f &&
           ggml_get_op_params_f32(t, 3) == 0.0f;
}

struct finder {
    ggml_cgraph *                                                   graph;
    std::map<const ggml_tensor *, std::vector<const ggml_tensor *>> users; // once per use
    std::map<const ggml_tensor *, std::vector<const ggml_tensor *>> writes; // SET_ROWS by the tensor that they write to
    std::map<std::string, int>                                      n_uses; // by name: tied embeddings are two tensors of one name

    explicit finder(ggml_cgraph * graph) : graph(graph) {
        for (int i = 0; i < graph->n_nodes; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            for (int j = 0; j < GGML_MAX_SRC; ++j) {
                if (node->src[j]) {
                    users[node->src[j]].push_back(node);
                    ++n_uses[node->src[j]->name];
                }
            }
            if (node->op == GGML_OP_SET_ROWS) {
                writes[node->view_src].push_back(node);
            }
        }
    }

    // What is found on the way from a product's input to the tensors that make it.
    struct path {
        std::set<const ggml_tensor *> nodes;
        scale_group                   group;
    };

    // Follow a value back to the tensors that its columns are proportional to.
    bool trace(const ggml_tensor * t, path & p) const {
        if (!t || is_leaf(t)) {
            return false;
        }
        p.nodes.insert(t);
        if (keeps_columns(t)) {
            return trace(t->src[0], p);
        }
        if (t->op == GGML_OP_RESHAPE && t->src[0]->op == GGML_OP_FLASH_ATTN_EXT && t->ne[0] == t->src[0]->ne[0] * t->src[0]->ne[1]) {
            return trace_attention(t->src[0], p);
        }
        if (t->op == GGML_OP_MUL_MAT) {
            p.group.producers.push_back(t->src[0]);
            return is_leaf(t->src[0]) && t->src[0]->ne[2] * t->src[0]->ne[3] == 1;
        }
        if (is_linear_gate(t)) {
            return trace(t->src[1], p);
        }
        if (t->op != GGML_OP_MUL && t->op != GGML_OP_ADD) {
            return false;
        }
        if (is_vector(t->src[1], t->ne[0])) {
            p.group.producers.push_back(t->src[1]);
            return t->op == GGML_OP_MUL || trace(t->src[0], p);
        }
        if (t->op == GGML_OP_ADD) {
            return false;
        }
        path other = p;
        if (ggml_are_same_shape(t, t->src[0]) && trace(t->src[0], p)) {
            return true;
        }
        p = other;
        return ggml_are_same_shape(t, t->src[1]) && trace(t->src[1], p);
    }

    static const ggml_tensor * skip_casts(const ggml_tensor * t, std::set<const ggml_tensor *> & nodes) {
        while (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_CPY || t->op == GGML_OP_CONT) {
            nodes.insert(t);
            t = t->src[0];
        }
        return t;
    }

    // Attention is linear in the values of its heads, which come from the cache.
    bool trace_attention(const ggml_tensor * attention, path & p) const {
        const int64_t size = attention->ne[0], n_heads = attention->ne[1], n_values = attention->src[2]->ne[2];
        p.nodes.insert(attention);
        const ggml_tensor * values = skip_casts(attention->src[2], p.nodes);
        if (is_leaf(values)) {
            const auto write = writes.find(values);
            if (write == writes.end() || write->second.size() != 1) {
                return false;
            }
            p.nodes.insert({ values, write->second[0] });
            values = skip_casts(write->second[0]->src[0], p.nodes);
        }
        p.group.block  = size;
        p.group.repeat = n_values ? n_heads / n_values : 1;
        return values->ne[0] == size * n_values && trace(values, p);
    }

    // Add the products that read the values at the end of a path. False if something else reads them.
    bool add_consumers(const ggml_tensor * t, path & p) const {
        const auto found = users.find(t);
        if (found == users.end()) {
            return true;
        }
        for (const ggml_tensor * user : found->second) {
            if (p.nodes.count(user)) {
                continue;
            }
            if (is_product(user) && user->src[1] == t && is_leaf(user->src[0])) {
                p.group.consumers.push_back(user->src[0]);
            } else if (user->src[0] == t && keeps_columns(user)) {
                if (!add_consumers(user, p)) {
                    return false;
                }
            } else {
                return false;
            }
        }
        return true;
    }

    // Whether only the path reads the values between producers and the end, and only the group reads its tensors, which have a scale per row.
    bool is_closed(const path & p, const ggml_tensor * end) const {
        for (const ggml_tensor * node : p.nodes) {
            const auto readers = users.find(node);
            const auto is_on_path = [&](const ggml_tensor * user) { return p.nodes.count(user) != 0; };
            if (node != end && readers != users.end() && !std::all_of(readers->second.begin(), readers->second.end(), is_on_path)) {
                return false;
            }
        }
        const int64_t n_rows  = p.group.consumers[0]->ne[0] / p.group.repeat;
        const auto    has_row = [&](const ggml_tensor * t) { return (ggml_nelements(t) == t->ne[0] ? t->ne[0] : t->ne[1]) == n_rows; };
        const auto    has_one_use = [&](const ggml_tensor * t) { return n_uses.at(t->name) == 1; };
        return std::all_of(p.group.producers.begin(), p.group.producers.end(), has_row) &&
               std::all_of(p.group.producers.begin(), p.group.producers.end(), has_one_use) &&
               std::all_of(p.group.consumers.begin(), p.group.consumers.end(), has_one_use);
    }

    std::vector<scale_group> find() const {
        std::vector<scale_group>      groups;
        std::set<const ggml_tensor *> seen;
        for (int i = 0; i < graph->n_nodes; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            if (!is_product(node) || !is_leaf(node->src[0])) {
                continue;
            }
            const ggml_tensor * end = node->src[1];
            while (keeps_columns(end)) {
                end = end->src[0];
            }
            path p;
            p.group.block = node->src[0]->ne[0];
            if (seen.insert(end).second && trace(end, p) && add_consumers(end, p) && is_closed(p, end)) {
                groups.push_back(p.group);
            }
        }
        return groups;
    }
};

} // namespace

std::vector<scale_group> find_scale_groups(ggml_cgraph * graph) { return finder(graph).find(); }

struct scaled_run::state {
    std::map<std::string, std::vector<float>>          columns, rows; // scales by tensor
    std::vector<std::pair<ggml_tensor *, void *>>      originals;     // vectors, with their data
    std::vector<std::vector<float>>                    divided;       // their data during the run
};

// Multiply the columns of activations by scales, or divide them.
static void scale_columns(ggml_tensor * t, const std::vector<float> & scales, bool divide) {
    for (int64_t i = 0; i < ggml_nrows(t); ++i) {
        const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / t->ne[1] / t->ne[2];
        float *       row = (float *) ((char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
        for (int64_t j = 0; j < t->ne[0]; ++j) {
            row[j] = divide ? row[j] / scales[j] : row[j] * scales[j];
        }
    }
}

scaled_run::scaled_run(const std::vector<scale_group> & groups) : s(std::make_unique<state>()) {
    uint32_t random = 1;
    for (const scale_group & group : groups) {
        const int64_t      n = group.consumers[0]->ne[0], n_rows = n / group.repeat;
        std::vector<float> scales(n_rows), columns(n);
        for (float & scale : scales) {
            random = random * 1664525 + 1013904223;
            scale  = std::ldexp(1.0f, (int) (random >> 24) % 5 - 2);
        }
        for (int64_t j = 0; j < n; ++j) {
            columns[j] = scales[j / (group.block * group.repeat) * group.block + j % group.block];
        }
        for (const ggml_tensor * t : group.consumers) {
            s->columns[t->name] = columns;
        }
        for (ggml_tensor * t : group.producers) {
            if (ggml_nelements(t) != n_rows) {
                s->rows[t->name] = scales;
            } else if (t->type == GGML_TYPE_F32) {
                const float *      values = (const float *) t->data;
                std::vector<float> divided(values, values + n_rows);
                std::transform(divided.begin(), divided.end(), scales.begin(), divided.begin(), std::divides<float>());
                s->originals.emplace_back(t, t->data);
                s->divided.push_back(std::move(divided));
                t->data = s->divided.back().data();
            }
        }
    }
}

scaled_run::~scaled_run() {
    for (const auto & [tensor, data] : s->originals) {
        tensor->data = data;
    }
}

bool scaled_run::evaluate(ggml_tensor * node, bool is_before, void * run) {
    const state & s = *((const scaled_run *) run)->s;
    if (is_product(node)) {
        // the columns of the matrix, by way of its input
        const auto columns = s.columns.find(node->src[0]->name);
        if (columns != s.columns.end() && node->src[1]->type == GGML_TYPE_F32) {
            scale_columns(node->src[1], columns->second, !is_before);
        }
        const auto rows = s.rows.find(node->src[0]->name);
        if (rows != s.rows.end() && !is_before) {
            scale_columns(node, rows->second, true);
        }
    }
    return true;
}

} // namespace ggml_ext
