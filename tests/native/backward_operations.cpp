// Check the gradients of single operations against finite differences (backward_driver.cpp --operations).
//
// Prints a line of JSON per operation: {"name": NAME, "of": [[exact, difference, scale] of each input]}. For a random seed s at the output, the
// function f, a random direction d of an input and its gradients g: exact is <g, d>, difference is (<s, f(e d)> - <s, f(-e d)>)/2e, and scale
// is |g||d|/sqrt(n).
#include "streams/backward.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>

#include "ggml-backend.h"

namespace {

using values  = std::vector<float>;
using shape   = std::array<int64_t, 4>;
using tensors = std::vector<ggml_tensor *>;

struct operation {
    const char *       name;
    std::vector<shape> inputs, constants;
    std::function<ggml_tensor *(ggml_context *, const tensors & inputs, const tensors & constants)> build;
};

ggml_tensor * make_zeros(ggml_context * ctx, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return ggml_fill(ctx, ggml_new_tensor_4d(ctx, GGML_TYPE_F32, ne0, ne1, ne2, ne3), 0.0f);
}

// The output of a recurrence, without its states.
ggml_tensor * take_output(ggml_context * ctx, ggml_tensor * t, const ggml_tensor * like) {
    return ggml_cont(ctx, ggml_view_1d(ctx, t, ggml_nelements(like), 0));
}

ggml_tensor * build_scan(ggml_context * ctx, const tensors & in, const tensors & constants) {
    ggml_tensor * x = in[0], * b = in[2];
    ggml_tensor * ids = ggml_cast(ctx, ggml_fill(ctx, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, x->ne[3]), 0.0f), GGML_TYPE_I32);
    ggml_tensor * a   = ggml_neg(ctx, ggml_exp(ctx, constants[0]));
    return take_output(ctx, ggml_ssm_scan(ctx, make_zeros(ctx, b->ne[0], x->ne[0], x->ne[1], 1), x, in[1], a, b, in[3], ids, 1), x);
}

ggml_tensor * build_delta(ggml_context * ctx, const tensors & in, const tensors &) {
    ggml_tensor * v = in[2], * k = ggml_l2_norm(ctx, in[1], 1e-6f), * gate = ggml_neg(ctx, ggml_exp(ctx, in[3]));
    ggml_tensor * state = make_zeros(ctx, v->ne[0], v->ne[0], v->ne[1], v->ne[3]);
    return take_output(ctx, ggml_gated_delta_net(ctx, in[0], k, v, gate, ggml_sigmoid(ctx, in[4]), state, 1), v);
}

const std::vector<operation> & all_operations() {
    static const std::vector<operation> all = {
        { "convolution", { { 9, 5, 2, 1 } }, { { 4, 5, 1, 1 } },
          [](auto * ctx, auto & in, auto & c) { return ggml_ssm_conv(ctx, in[0], c[0]); } },
        { "scan with a decay per state", { { 1, 20, 7, 2 }, { 20, 7, 2, 1 }, { 3, 1, 7, 2 }, { 3, 1, 7, 2 } }, { { 3, 20, 1, 1 } }, build_scan },
        { "scan with a decay per head", { { 4, 6, 7, 1 }, { 6, 7, 1, 1 }, { 3, 2, 7, 1 }, { 3, 2, 7, 1 } }, { { 1, 6, 1, 1 } }, build_scan },
        { "delta net with a gate per head", { { 8, 2, 7, 1 }, { 8, 2, 7, 1 }, { 8, 4, 7, 1 }, { 1, 4, 7, 1 }, { 1, 4, 7, 1 } }, {}, build_delta },
        { "delta net with a gate per column", { { 8, 4, 7, 2 }, { 8, 4, 7, 2 }, { 8, 4, 7, 2 }, { 8, 4, 7, 2 }, { 1, 4, 7, 2 } }, {}, build_delta },
        { "mixing matrix", { { 24, 5, 1, 1 } }, { { 3, 1, 1, 1 }, { 24, 1, 1, 1 } },
          [](auto * ctx, auto & in, auto & c) { return ggml_dsv4_hc_comb(ctx, in[0], c[0], c[1], 1e-3f, 3); } },
        { "read of streams", { { 6, 4, 5, 1 }, { 4, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_dsv4_hc_pre(ctx, in[0], in[1]); } },
        { "gated read of streams", { { 6, 4, 5, 1 }, { 6, 4, 5, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_dsv4_hc_pre_gated(ctx, in[0], in[1], 0.5f); } },
        { "write to streams", { { 6, 5, 1, 1 }, { 6, 4, 5, 1 }, { 4, 5, 1, 1 }, { 4, 4, 5, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_dsv4_hc_post(ctx, in[0], in[1], in[2], in[3]); } },
        { "write to streams that do not mix", { { 6, 5, 1, 1 }, { 6, 4, 5, 1 }, { 4, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_scale(ctx, ggml_dsv4_hc_post(ctx, in[0], in[1], in[2], nullptr), 2.0f); } },
        { "SWIGLU_OAI", { { 64, 5, 1, 1 }, { 64, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_swiglu_oai(ctx, in[0], in[1], 1.7f, 1.0f); } },
        { "SWIGLU_CLAMP", { { 64, 5, 1, 1 }, { 64, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_swiglu_clamp(ctx, in[0], in[1], 1.0f); } },
        { "softmax", { { 7, 5, 2, 1 } }, { { 7, 5, 1, 1 } },
          [](auto * ctx, auto & in, auto & c) { return ggml_soft_max_ext(ctx, in[0], c[0], 0.5f, 0.0f); } },
        { "concatenation", { { 6, 2, 5, 1 }, { 6, 3, 5, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_concat(ctx, in[0], in[1], 1); } },
        { "product of activations", { { 4, 5, 2, 1 }, { 4, 6, 6, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_mul_mat(ctx, in[0], in[1]); } },
        { "quotient", { { 6, 5, 1, 1 }, { 1, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_div(ctx, in[0], ggml_sqrt(ctx, ggml_exp(ctx, in[1]))); } },
        { "sum of rows", { { 6, 5, 1, 1 } }, {},
          [](auto * ctx, auto & in, auto &) { return ggml_mul(ctx, in[0], ggml_sum_rows(ctx, ggml_abs(ctx, in[0]))); } },
        { "backward rotation", { { 8, 2, 5, 1 } }, {},
          [](auto * ctx, auto & in, auto &) {
              ggml_tensor * positions = ggml_cast(ctx, ggml_arange(ctx, 0.0f, (float) in[0]->ne[2], 1.0f), GGML_TYPE_I32);
              return ggml_rope_ext_back(ctx, in[0], positions, nullptr, 8, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f);
          } },
    };
    return all;
}

std::mt19937 source(1);

values draw(size_t n) {
    std::normal_distribution<float> normal;
    values result(n);
    for (float & f : result) {
        f = normal(source);
    }
    return result;
}

double dot(const values & a, const values & b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        sum += (double) a[i]*b[i];
    }
    return sum;
}

values get(const ggml_tensor * t) {
    values result(ggml_nelements(t));
    ggml_ext::copy_rows(t, result.data());
    return result;
}

// Print the gradient of one input.
void print_input(ggml_backend_t cpu, const operation & op, size_t index, const char * before) {
    ggml_context_ptr owner(ggml_init({ 1 << 20, nullptr, true }));
    ggml_context *   ctx = owner.get();
    tensors          inputs, constants;
    std::vector<std::pair<ggml_tensor *, values>> points;
    const auto make = [&](const std::vector<shape> & shapes, tensors & list) {
        for (const shape & ne : shapes) {
            list.push_back(ggml_new_tensor(ctx, GGML_TYPE_F32, 4, ne.data()));
            ggml_set_input(list.back());
            points.emplace_back(list.back(), draw(ggml_nelements(list.back())));
        }
    };
    make(op.inputs, inputs);
    make(op.constants, constants);
    ggml_tensor * out   = op.build(ctx, inputs, constants);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_ext::keep_value(out);
    ggml_ext::layer layer;
    layer.start = inputs[index];
    ggml_ext::backward back;
    if (!back.build({ ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph) }, layer)) {
        throw std::runtime_error(back.error());
    }
    back.append(graph);
    ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(cpu)));
    ggml_gallocr_alloc_graph(memory.get(), graph);
    const values seed = draw(ggml_nelements(out)), d = draw(ggml_nelements(layer.start));
    const auto   compute = [&](float step) {
        for (const auto & point : points) {
            values moved = point.second;
            for (size_t i = 0; point.first == layer.start && i < moved.size(); ++i) {
                moved[i] += step*d[i];
            }
            ggml_backend_tensor_set(point.first, moved.data(), 0, ggml_nbytes(point.first));
        }
        ggml_backend_tensor_set(back.seed(), seed.data(), 0, ggml_nbytes(back.seed()));
        ggml_backend_graph_compute(cpu, graph);
        return dot(seed, get(out));
    };
    compute(0.0f);
    const values  g = get(back.gradient(layer.start));
    constexpr float e = 1.0f/1024; // few values cross a bound of SWIGLU_OAI or the 0 of abs
    printf("%s[%.9g, %.9g, %.9g]", before, dot(g, d), (compute(e) - compute(-e))/(2*e), std::sqrt(dot(g, g)*dot(d, d)/(double) g.size()));
}

} // namespace

void print_operations() {
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    for (const operation & op : all_operations()) {
        printf("{\"name\": \"%s\", \"of\": [", op.name);
        for (size_t i = 0; i < op.inputs.size(); ++i) {
            print_input(cpu.get(), op, i, i ? ", " : "");
        }
        printf("]}\n");
    }
}
