#include "backward.h"

#include "../graph/views.h"
#include "recurrences.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-impl.h"

namespace ggml_ext {

// The router selects experts. Selection has no gradient, so it counts as a constant.
static bool is_router(const ggml_tensor * t) {
    return strstr(t->src[0]->name, "ffn_gate_inp") != nullptr;
}

bool backward::refuse(const ggml_tensor * node, const char * what) {
    message = std::string("gradients of ") + ggml_op_desc(node) + what + " (" + node->name + ") are not known";
    return false;
}

ggml_tensor * backward::gradient(const ggml_tensor * t) const {
    const auto it = grads.find(t);
    return it == grads.end() ? nullptr : it->second;
}

bool backward::build(const std::vector<ggml_tensor *> & nodes, const layer & info) {
    const size_t n_tensors = 64*nodes.size() + 64;
    owner.reset(ggml_init({ n_tensors*ggml_tensor_overhead(), nullptr, true }));
    ctx = owner.get();
    if (info.start) {
        active.insert(info.start);
    }
    for (ggml_tensor * node : nodes) {
        bool depends = is_product(node);
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j) {
            depends = depends || active.count(node->src[j]);
            if (written.count(node->src[j]) || (read.count(node->src[j]) && !active.count(node->src[j]))) {
                read.insert(node);
            }
        }
        if (node->op == GGML_OP_SET_ROWS && node->view_src) {
            written[node->view_src] = node->src[0];
        } else if (depends && node->type == GGML_TYPE_F32 && !(is_product(node) && is_router(node))) {
            active.insert(node);
        }
    }
    ggml_tensor * last = nodes.back();
    grads[last] = seed_tensor = ggml_new_tensor(ctx, GGML_TYPE_F32, GGML_MAX_DIMS, last->ne);
    ggml_set_input(seed_tensor);
    // A product that is the only term added to the stream has this tensor as its gradient. append() skips it, so its value is kept here.
    keep_value(seed_tensor);
    for (size_t i = nodes.size(); i-- > 0;) {
        if (active.count(nodes[i]) && gradient(nodes[i]) && !differentiate(nodes[i])) {
            return false;
        }
    }
    return true;
}

void backward::append(ggml_cgraph * graph) const {
    for (const auto & g : grads) {
        const bool is_start = g.first->op == GGML_OP_NONE;
        if (g.second != seed_tensor && (is_start || is_product(g.first))) {
            keep_value(g.second);
            ggml_build_forward_expand(graph, g.second);
        }
    }
}

// Add g to the gradient of t, summed over the repetitions of t. All gradients are contiguous.
bool backward::add_gradient(ggml_tensor * t, ggml_tensor * g) {
    if (active.count(t)) {
        g = ggml_are_same_shape(g, t) ? g : ggml_repeat_back(ctx, g, t);
        ggml_tensor *& sum = grads[t];
        sum = sum ? ggml_add(ctx, sum, g) : g;
    }
    return true;
}

ggml_tensor * backward::make_contiguous(ggml_tensor * t) {
    return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
}

ggml_tensor * backward::transpose(ggml_tensor * t) {
    return ggml_cont(ctx, ggml_transpose(ctx, ggml_is_quantized(t->type) ? ggml_cast(ctx, t, GGML_TYPE_F32) : t));
}

// Return zeros of the shape of `in`, with g in the place of the view.
ggml_tensor * backward::scatter_view(ggml_tensor * g, ggml_tensor * in, const ggml_tensor * view) {
    size_t offset;
    memcpy(&offset, view->op_params, sizeof(offset));
    ggml_tensor * zeros = ggml_fill(ctx, ggml_dup_tensor(ctx, in), 0.0f);
    return ggml_acc(ctx, zeros, g, view->nb[1], view->nb[2], view->nb[3], offset);
}

bool backward::differentiate(ggml_tensor * node) {
    ggml_tensor * g = grads.at(node), * a = node->src[0], * b = node->src[1];
    const bool    is_attention = node->op == GGML_OP_FLASH_ATTN_EXT || node->op == GGML_OP_MUL_MAT; // which find what is in the cache
    const auto    is_read      = [this](const ggml_tensor * t) { return read.count(t) && !active.count(t); };
    if (!is_attention && std::any_of(node->src, node->src + GGML_MAX_SRC, is_read)) {
        return refuse(node, " of a cache");
    }
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_SET_ROWS:
            return true;
        case GGML_OP_ADD_ID: // biases of experts
        case GGML_OP_REPEAT:
            return add_gradient(a, g);
        case GGML_OP_ADD:
            return add_gradient(a, g) && add_gradient(b, g);
        case GGML_OP_SUB:
            return add_gradient(a, g) && add_gradient(b, ggml_neg(ctx, g));
        case GGML_OP_MUL:
            return add_gradient(a, ggml_mul(ctx, g, b)) && add_gradient(b, ggml_mul(ctx, g, a));
        case GGML_OP_DIV: // of b: -g y / b
            return add_gradient(a, ggml_div(ctx, g, b)) &&
                   (!active.count(b) || add_gradient(b, ggml_neg(ctx, ggml_div(ctx, ggml_mul(ctx, g, node), b))));
        case GGML_OP_SCALE:
            return add_gradient(a, ggml_scale(ctx, g, ggml_get_op_params_f32(node, 0)));
        case GGML_OP_SQR:
            return add_gradient(a, ggml_scale(ctx, ggml_mul(ctx, g, a), 2.0f));
        case GGML_OP_SQRT:
            return add_gradient(a, ggml_scale(ctx, ggml_div(ctx, g, node), 0.5f));
        case GGML_OP_CLAMP:
            return add_gradient(a, ggml_mul(ctx, g, is_within(a, ggml_get_op_params_f32(node, 0), ggml_get_op_params_f32(node, 1))));
        case GGML_OP_SUM_ROWS:
            return add_gradient(a, ggml_repeat(ctx, g, a));
        case GGML_OP_L2_NORM: { // (g - y sum(g y)) / max(|x|, eps)
            ggml_tensor * length = ggml_clamp(ctx, ggml_sqrt(ctx, ggml_sum_rows(ctx, ggml_sqr(ctx, make_contiguous(a)))),
                                              ggml_get_op_params_f32(node, 0), INFINITY);
            ggml_tensor * along  = ggml_mul(ctx, node, ggml_sum_rows(ctx, ggml_mul(ctx, g, node)));
            return add_gradient(a, ggml_div(ctx, ggml_sub(ctx, g, along), length));
        }
        case GGML_OP_SOFT_MAX:
            return add_gradient(a, ggml_soft_max_ext_back(ctx, g, node, ggml_get_op_params_f32(node, 0), 0.0f));
        case GGML_OP_CONCAT: {
            const int dim = ggml_get_op_params_i32(node, 0);
            const auto part = [&](const ggml_tensor * t, int64_t first) {
                return ggml_cont(ctx, ggml_view_4d(ctx, g, t->ne[0], t->ne[1], t->ne[2], t->ne[3], g->nb[1], g->nb[2], g->nb[3], first*g->nb[dim]));
            };
            return add_gradient(a, part(a, 0)) && add_gradient(b, part(b, a->ne[dim]));
        }
        case GGML_OP_RMS_NORM:
            return add_gradient(a, ggml_rms_norm_back(ctx, g, make_contiguous(a), ggml_get_op_params_f32(node, 0)));
        case GGML_OP_NORM: { // RMS_NORM of x minus its mean
            ggml_tensor * x = make_contiguous(a);
            ggml_tensor * gx = ggml_rms_norm_back(ctx, g, ggml_sub(ctx, x, ggml_mean(ctx, x)), ggml_get_op_params_f32(node, 0));
            return add_gradient(a, ggml_sub(ctx, gx, ggml_mean(ctx, gx)));
        }
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_RESHAPE:
            return add_gradient(a, ggml_reshape(ctx, g, a));
        case GGML_OP_VIEW:
            if (ggml_nelements(a) == ggml_nelements(node)) { // in the same order
                return add_gradient(a, ggml_reshape(ctx, g, a));
            }
            return ggml_is_contiguous(a) ? add_gradient(a, scatter_view(g, a, node)) : refuse(node);
        case GGML_OP_TRANSPOSE:
            return add_gradient(a, ggml_cont(ctx, ggml_transpose(ctx, g)));
        case GGML_OP_PERMUTE: {
            int inverse[GGML_MAX_DIMS];
            for (int i = 0; i < GGML_MAX_DIMS; ++i) {
                inverse[ggml_get_op_params_i32(node, i)] = i;
            }
            return add_gradient(a, make_contiguous(ggml_permute(ctx, g, inverse[0], inverse[1], inverse[2], inverse[3])));
        }
        case GGML_OP_GET_ROWS: // only if it selects all rows
            return ggml_are_same_shape(a, node) && b->op == GGML_OP_NONE ? add_gradient(a, g) : refuse(node);
        case GGML_OP_UNARY:
            if (ggml_get_unary_op(node) == GGML_UNARY_OP_SGN) {
                return true;
            }
            if (ggml_tensor * s = differentiate_unary(ggml_get_unary_op(node), a)) {
                return add_gradient(a, ggml_mul(ctx, s, g));
            }
            return refuse(node);
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            return differentiate_product(node, g);
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK:
            return differentiate_rope(node, g);
        case GGML_OP_GLU:
            return differentiate_glu(node, g);
        case GGML_OP_FLASH_ATTN_EXT:
            return differentiate_attention(node, g);
        case GGML_OP_DSV4_HC_PRE:
        case GGML_OP_DSV4_HC_POST:
            return differentiate_streams(node, g);
        default: {
            const input_gradients inputs = differentiate_recurrence(ctx, node, g);
            for (const auto & input : inputs) {
                add_gradient(input.first, input.second);
            }
            return !inputs.empty() || refuse(node);
        }
    }
}

// Sum the matrices of t, [.., .., m, ..], in groups of neighbours that shared one of n.
ggml_tensor * backward::sum_matrices(ggml_tensor * t, int64_t n) {
    const int64_t size = t->ne[0]*t->ne[1];
    ggml_tensor * sum  = ggml_repeat_back(ctx, ggml_reshape_4d(ctx, t, size, t->ne[2]/n, n, t->ne[3]),
                                          ggml_new_tensor_4d(ctx, GGML_TYPE_F32, size, 1, n, t->ne[3]));
    return ggml_reshape_4d(ctx, sum, t->ne[0], t->ne[1], n, t->ne[3]);
}

bool backward::differentiate_product(ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * weight = node->src[0], * x = node->src[1];
    if (!is_weight(skip_views(weight))) {
        return differentiate_activations(node, g);
    }
    if (!active.count(x)) {
        return true;
    }
    ggml_tensor * known = find_transposed ? find_transposed(weight) : nullptr, * transposed = known ? known : transpose(weight);
    return add_gradient(x, node->op == GGML_OP_MUL_MAT ? ggml_mul_mat(ctx, transposed, g) : ggml_mul_mat_id(ctx, transposed, g, node->src[2]));
}

// Differentiate a^T b.
bool backward::differentiate_activations(ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * a = node->src[0], * b = node->src[1];
    const bool    is_cached = read.count(a) && !active.count(a);
    const cached  c = is_cached ? find_cached(a) : cached();
    if (node->op != GGML_OP_MUL_MAT || a->ne[3] != b->ne[3] || (is_cached && !c.data) || (read.count(b) && !active.count(b))) {
        return refuse(node, " of two activations");
    }
    if (active.count(a)) {
        add_gradient(a, sum_matrices(ggml_mul_mat(ctx, transpose(b), transpose(g)), a->ne[2]));
    } else if (c.data) { // the first cells hold the tokens in order
        ggml_tensor * g_a = sum_matrices(ggml_mul_mat(ctx, transpose(b), transpose(g)), a->ne[2]);
        g_a = c.is_transposed ? transpose(g_a) : g_a; // [head, cells, heads]
        const int64_t n = ggml_nelements(c.data)/c.n_data;
        g_a = ggml_view_3d(ctx, g_a, g_a->ne[0], n, g_a->ne[2], g_a->nb[1], g_a->nb[2], 0);
        add_to_columns(c, ggml_reshape_2d(ctx, ggml_cont(ctx, ggml_permute(ctx, g_a, 0, 2, 1, 3)), c.n, n));
    }
    return !active.count(b) || add_gradient(b, ggml_mul_mat(ctx, transpose(a), g));
}

// Differentiate the reading of residual streams and the writing to them: y = scale sum of w[i] x[i]; y[i] = w[i] x + sum of c[i, j] r[j].
bool backward::differentiate_streams(ggml_tensor * node, ggml_tensor * g) {
    if (node->op == GGML_OP_DSV4_HC_PRE) {
        ggml_tensor * x = node->src[0], * w = node->src[1];
        ggml_tensor * g_x = ggml_reshape_3d(ctx, ggml_scale(ctx, g, ggml_get_op_params_f32(node, 0)), g->ne[0], 1, g->ne[1]);
        if (ggml_get_op_params_i32(node, 1)) { // w is the sigmoid of a gate for each value
            ggml_tensor * s = ggml_sigmoid(ctx, w), * wide = ggml_repeat(ctx, g_x, x);
            return add_gradient(x, ggml_mul(ctx, wide, s)) &&
                   add_gradient(w, ggml_mul(ctx, ggml_mul(ctx, wide, x), ggml_sub(ctx, s, ggml_sqr(ctx, s))));
        }
        ggml_tensor * weights = ggml_reshape_3d(ctx, make_contiguous(w), 1, w->ne[0], w->ne[1]);
        return add_gradient(x, ggml_mul(ctx, ggml_repeat(ctx, g_x, x), weights)) &&
               add_gradient(w, ggml_reshape(ctx, ggml_mul_mat(ctx, make_contiguous(x), g_x), w));
    }
    ggml_tensor * x = node->src[0], * r = node->src[1], * w = node->src[2], * c = node->src[3];
    ggml_tensor * wide = ggml_reshape_3d(ctx, make_contiguous(x), x->ne[0], 1, x->ne[1]);
    add_gradient(x, ggml_dsv4_hc_pre(ctx, g, w));
    add_gradient(w, ggml_reshape(ctx, ggml_mul_mat(ctx, g, wide), w));
    if (!c) {
        return add_gradient(r, g);
    }
    return add_gradient(r, ggml_mul_mat(ctx, transpose(g), make_contiguous(c))) && add_gradient(c, ggml_mul_mat(ctx, g, make_contiguous(r)));
}

// Rotate by the opposite angles.
bool backward::differentiate_rope(ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * result = ggml_dup_tensor(ctx, g);
    result->op           = node->op == GGML_OP_ROPE ? GGML_OP_ROPE_BACK : GGML_OP_ROPE;
    std::copy_n(node->src, GGML_MAX_SRC, result->src);
    result->src[0] = g;
    memcpy(result->op_params, node->op_params, sizeof(node->op_params));
    return add_gradient(node->src[0], result);
}

// Return the derivative of each element; null if the operation is not supported.
ggml_tensor * backward::differentiate_unary(ggml_unary_op op, ggml_tensor * x) {
    switch (op) {
        case GGML_UNARY_OP_RELU:
            return ggml_step(ctx, x);
        case GGML_UNARY_OP_SIGMOID: { // s - s^2
            ggml_tensor * s = ggml_sigmoid(ctx, x);
            return ggml_sub(ctx, s, ggml_sqr(ctx, s));
        }
        case GGML_UNARY_OP_SOFTPLUS:
            return ggml_sigmoid(ctx, x);
        case GGML_UNARY_OP_EXP:
            return ggml_exp(ctx, x);
        case GGML_UNARY_OP_NEG:
            return ggml_fill(ctx, ggml_dup_tensor(ctx, x), -1.0f);
        case GGML_UNARY_OP_ABS:
            return ggml_sgn(ctx, x);
        case GGML_UNARY_OP_TANH:
            return ggml_scale_bias(ctx, ggml_sqr(ctx, ggml_tanh(ctx, x)), -1.0f, 1.0f);
        case GGML_UNARY_OP_SILU: { // s + y - y s, y = x s
            ggml_tensor * s = ggml_sigmoid(ctx, x), * y = ggml_silu(ctx, x);
            return ggml_sub(ctx, ggml_add(ctx, s, y), ggml_mul(ctx, y, s));
        }
        case GGML_UNARY_OP_GELU:
        case GGML_UNARY_OP_GELU_ERF: { // (1 + t)/2 + x (1 - t^2) (c + 3 c d x^2)/2, t = tanh(c x + c d x^3); the exact one is within 0.001
            const float   c = 0.79788456f, d = 0.044715f;
            ggml_tensor * x2 = ggml_sqr(ctx, x);
            ggml_tensor * t  = ggml_tanh(ctx, ggml_mul(ctx, x, ggml_scale_bias(ctx, x2, c*d, c)));
            ggml_tensor * dt = ggml_scale_bias(ctx, ggml_sqr(ctx, t), -1.0f, 1.0f);
            ggml_tensor * second = ggml_mul(ctx, ggml_mul(ctx, x, dt), ggml_scale_bias(ctx, x2, 1.5f*c*d, 0.5f*c));
            return ggml_add(ctx, ggml_scale_bias(ctx, t, 0.5f, 0.5f), second);
        }
        case GGML_UNARY_OP_GELU_QUICK: { // s + x k (s - s^2), s = sigmoid(k x)
            const float   k = 1.702f;
            ggml_tensor * s = ggml_sigmoid(ctx, ggml_scale(ctx, x, k));
            return ggml_add(ctx, s, ggml_scale(ctx, ggml_mul(ctx, x, ggml_sub(ctx, s, ggml_sqr(ctx, s))), k));
        }
        default:
            return nullptr;
    }
}

// Return t with its values bounded.
ggml_tensor * backward::bound(ggml_tensor * t, float min, float max) {
    return ggml_clamp(ctx, make_contiguous(t), min, max);
}

// Return 1 for each value within the bounds, else 0.
ggml_tensor * backward::is_within(ggml_tensor * t, float min, float max) {
    ggml_tensor * result = ggml_step(ctx, ggml_scale_bias(ctx, t, -1.0f, max));
    return std::isinf(min) ? result : ggml_mul(ctx, result, ggml_step(ctx, ggml_scale_bias(ctx, t, 1.0f, -min)));
}

// Differentiate f(a) b, where a and b are two tensors or the halves of one. With a limit, it bounds them: a from above, b on both sides.
bool backward::differentiate_glu(ggml_tensor * node, ggml_tensor * g) {
    static const std::map<ggml_glu_op, ggml_unary_op> known = {
        { GGML_GLU_OP_REGLU, GGML_UNARY_OP_RELU },           { GGML_GLU_OP_GEGLU, GGML_UNARY_OP_GELU }, { GGML_GLU_OP_SWIGLU, GGML_UNARY_OP_SILU },
        { GGML_GLU_OP_GEGLU_ERF, GGML_UNARY_OP_GELU_ERF }, { GGML_GLU_OP_GEGLU_QUICK, GGML_UNARY_OP_GELU_QUICK },
        { GGML_GLU_OP_SWIGLU_CLAMP, GGML_UNARY_OP_SILU },  { GGML_GLU_OP_SWIGLU_OAI, GGML_UNARY_OP_SILU },
    };
    const auto op = known.find(ggml_get_glu_op(node));
    if (op == known.end()) {
        return refuse(node);
    }
    ggml_tensor * halves = node->src[0], * a = halves, * b = node->src[1];
    const bool    swapped = ggml_get_op_params_i32(node, 1);
    if (!b) {
        const auto half = [&](int i) {
            const int64_t * ne = halves->ne;
            const size_t  * nb = halves->nb;
            return ggml_cont(ctx, ggml_view_4d(ctx, halves, node->ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], i*node->ne[0]*sizeof(float)));
        };
        a = half(swapped ? 1 : 0);
        b = half(swapped ? 0 : 1);
    }
    const bool    is_oai = op->first == GGML_GLU_OP_SWIGLU_OAI, is_bounded = is_oai || op->first == GGML_GLU_OP_SWIGLU_CLAMP;
    const float   limit = ggml_get_op_params_f32(node, 3), alpha = is_oai ? ggml_get_op_params_f32(node, 2) : 1.0f;
    ggml_tensor * x = is_bounded ? bound(a, -INFINITY, limit) : a, * y = is_bounded ? bound(b, -limit, limit) : b;
    if (is_oai) { // x sigmoid(alpha x) = silu(alpha x) / alpha, times b + 1
        x = ggml_scale(ctx, x, alpha);
        y = ggml_scale_bias(ctx, y, 1.0f, 1.0f);
    }
    ggml_tensor * ga = ggml_mul(ctx, ggml_mul(ctx, g, y), differentiate_unary(op->second, x));
    ggml_tensor * gb = ggml_mul(ctx, ggml_unary(ctx, x, op->second), g);
    if (is_bounded) {
        ga = ggml_mul(ctx, ga, is_within(a, -INFINITY, limit));
        gb = ggml_scale(ctx, ggml_mul(ctx, gb, is_within(b, -limit, limit)), 1.0f/alpha);
    }
    if (node->src[1]) {
        return add_gradient(a, ga) && add_gradient(b, gb);
    }
    return add_gradient(halves, swapped ? ggml_concat(ctx, gb, ga, 0) : ggml_concat(ctx, ga, gb, 0));
}

// Find what the layer has just written to the cache that attention reads as t, or t itself if it is not from a cache. Compressed values are
// columns of the keys. No data: it has another form.
backward::cached backward::find_cached(ggml_tensor * t) const {
    while (t->op == GGML_OP_CPY) { // an F32 cache, or none
        t = t->src[0];
    }
    t = t->op == GGML_OP_PERMUTE ? t->src[0] : t;
    const int64_t n = t->ne[0]*t->ne[1];
    if (active.count(t)) {
        return { t, n, 0, n, false };
    }
    const auto data = t->op == GGML_OP_VIEW ? written.find(t->view_src) : written.end();
    if (data == written.end() || data->second->type != GGML_TYPE_F32) {
        return {};
    }
    if (data->second->ne[0] == 1) { // [cells, heads, head]
        const int64_t n_values = t->ne[1]*t->ne[2];
        return { data->second, n_values, 0, n_values, true };
    }
    const cached result = { data->second, data->second->ne[0], (int64_t) (t->view_offs/ggml_element_size(t)), n, false };
    const bool   fits   = t->ne[1] == 1 ? result.first + n <= result.n_data : n == result.n_data;
    return fits ? result : cached();
}

// Return the columns that attention uses, [columns, tokens].
ggml_tensor * backward::take_columns(const cached & c) {
    ggml_tensor * t = ggml_reshape_2d(ctx, make_contiguous(c.data), c.n_data, ggml_nelements(c.data)/c.n_data);
    return c.n == c.n_data ? t : ggml_cont(ctx, ggml_view_2d(ctx, t, c.n, t->ne[1], t->nb[1], c.first*sizeof(float)));
}

// Add the gradient of these columns.
bool backward::add_to_columns(const cached & c, ggml_tensor * g) {
    if (c.n != c.n_data) {
        ggml_tensor * zeros = ggml_fill(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.n_data, g->ne[1]), 0.0f);
        g = ggml_acc(ctx, zeros, g, zeros->nb[1], zeros->nb[2], zeros->nb[3], c.first*sizeof(float));
    }
    return add_gradient(c.data, ggml_reshape(ctx, g, c.data));
}

// Differentiate attention as products with K and V and softmax(scale K^T Q). The cache was empty before the layer, so its first cells hold
// the tokens in order.
bool backward::differentiate_attention(ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * q = node->src[0], * mask = node->src[3];
    const cached  k = find_cached(node->src[1]), v = find_cached(node->src[2]);
    if (!k.data || !v.data || k.is_transposed || v.is_transposed) {
        return refuse(node, " to keys of another form");
    }
    float scale, max_bias, cap;
    memcpy(&scale, node->op_params, sizeof(scale));
    memcpy(&max_bias, node->op_params + 1, sizeof(max_bias));
    memcpy(&cap, node->op_params + 2, sizeof(cap));

    const int64_t n = ggml_nelements(k.data)/k.n_data, n_groups = q->ne[3], n_heads = q->ne[2]*n_groups;
    const int64_t n_kv_heads = node->src[1]->ne[2]*node->src[1]->ne[3];
    if (mask) {
        mask = ggml_cont(ctx, ggml_view_4d(ctx, mask, n, mask->ne[1], mask->ne[2], mask->ne[3], mask->nb[1], mask->nb[2], mask->nb[3], 0));
    }
    const auto join_groups = [&](ggml_tensor * t) { return ggml_reshape_3d(ctx, t, t->ne[0], t->ne[1], n_heads); };
    const auto split_heads = [&](ggml_tensor * t) { return ggml_cont(ctx, ggml_permute(ctx, t, 0, 2, 1, 3)); };
    const auto split_cache = [&](const cached & c) { return split_heads(ggml_reshape_3d(ctx, take_columns(c), c.n/n_kv_heads, n_kv_heads, n)); };
    ggml_tensor * keys = split_cache(k), * values = split_cache(v), * queries = join_groups(make_contiguous(q));
    ggml_tensor * g_out = join_groups(split_heads(g)); // as these: [head, tokens, heads]
    ggml_tensor * scores = ggml_mul_mat(ctx, keys, queries), * capped = nullptr; // [keys, tokens, heads]
    if (cap != 0.0f) {
        capped = ggml_tanh(ctx, ggml_scale(ctx, scores, scale/cap));
        scores = ggml_scale(ctx, capped, cap);
    }
    const float   scale_left = cap != 0.0f ? 1.0f : scale;
    ggml_tensor * p = ggml_soft_max_ext(ctx, ggml_reshape_4d(ctx, scores, n, q->ne[1], q->ne[2], n_groups), mask, scale_left, max_bias);
    ggml_soft_max_add_sinks(p, node->src[4]);
    p = join_groups(p);
    ggml_tensor * g_scores = ggml_soft_max_ext_back(ctx, ggml_mul_mat(ctx, values, g_out), p, scale_left, 0.0f);
    if (capped) {
        g_scores = ggml_scale(ctx, ggml_mul(ctx, g_scores, ggml_scale_bias(ctx, ggml_sqr(ctx, capped), -1.0f, 1.0f)), scale);
    }
    const auto add_to_cache = [&](ggml_tensor * weights, ggml_tensor * x, const cached & c) {
        ggml_tensor * t = sum_matrices(ggml_mul_mat(ctx, transpose(x), transpose(weights)), n_kv_heads); // [head, keys, heads]
        return add_to_columns(c, ggml_reshape_2d(ctx, split_heads(t), c.n, n));
    };
    return add_gradient(q, ggml_reshape(ctx, ggml_mul_mat(ctx, transpose(keys), g_scores), q)) && add_to_cache(g_scores, queries, k) && add_to_cache(p, g_out, v);
}

} // namespace ggml_ext
