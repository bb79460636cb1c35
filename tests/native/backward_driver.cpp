// Check the gradients of a model's layers (streams/backward.h) against finite differences, and the cuts of a layer (streams/layers.h).
//
//     ggml-ext-backward MODEL
//     ggml-ext-backward --transposed
//     ggml-ext-backward --boundary
//     ggml-ext-backward --operations
//
// The first prints a line of JSON per layer except the first: {"layer": N, "of": {NAME: [exact, difference, scale]}}, or {"refused": reason}.
// For a random seed s at the output, the layer's function f, and a direction d with gradients g: exact is <g, d>, difference is
// (<s, f(e d)> - <s, f(-e d)>)/2e for a small e. NAME "stream": d is a random direction of the layer's input, and the scale |g||d|/sqrt(n) is
// the expected size of exact. Other NAMEs are weight matrices, except those of experts: d is their gradient, the sum of g x^T over tokens,
// and the scale is exact.
// The second prints the gradient through a scale by 2 and a transposition: 6 values, for the seed 0 ... 5. The third prints the boundary of
// the third product of a layer that writes to a cache before the second product and reads it behind the third. The fourth is in
// backward_operations.cpp.
#include "streams/backward.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

#include "ggml-backend.h"
#include "hooks/llama-graph-cut.h"
#include "llama-cpp.h"

void print_operations(); // backward_operations.cpp

enum { TOKENS = 48 };

using values = std::vector<float>;

static double dot(const values & a, const values & b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        sum += (double) a[i]*b[i];
    }
    return sum;
}

static values get(const ggml_tensor * t) {
    values result(ggml_nelements(t));
    ggml_ext::copy_rows(t, result.data());
    return result;
}

struct probe {
    llama_context *          ctx = nullptr;
    int                      n_layers = 0, layer = 0;
    values                   x, seed;
    std::vector<std::vector<int32_t>> selections; // as the complete model makes them, by tensor
    bool                     differentiates = false, is_empty = false, is_full = false;
    std::string              refusal;
    ggml_ext::layered_graph  parts;
    ggml_ext::backward       back;
    ggml_tensor *            out = nullptr;

    std::function<void()> on_graph(ggml_cgraph * graph) {
        parts = {};
        if (!parts.read(graph, n_layers)) {
            throw std::runtime_error(parts.error());
        }
        const auto & current    = parts.layers()[layer];
        if (is_empty) {
            parts.cut(-1, {}, {}, {});
            return [] {};
        }
        if (is_full) {
            std::for_each(parts.selections().begin(), parts.selections().end(), ggml_ext::keep_value);
            return [] {};
        }
        const auto   nodes = parts.nodes(layer);
        parts.find_groups(layer);
        std::vector<ggml_tensor *> targets = { out = nodes.back() };
        for (const auto & g : current.groups) {
            targets.push_back(g.x);
        }
        if (!parts.cut(layer, parts.find_boundary(layer, 0), targets, {})) {
            throw std::runtime_error(parts.error());
        }
        if (differentiates) {
            back = ggml_ext::backward();
            if (back.build(nodes, current)) {
                back.append(graph);
            } else {
                refusal = back.error();
            }
        }
        return [this, start = current.start] {
            ggml_backend_tensor_set(start, x.data(), 0, ggml_nbytes(start));
            for (size_t i = 0; i < parts.selections().size(); ++i) {
                if (parts.selections()[i]->op == GGML_OP_NONE) {
                    ggml_backend_tensor_set(parts.selections()[i], selections[i].data(), 0, ggml_nbytes(parts.selections()[i]));
                }
            }
            if (differentiates && refusal.empty()) {
                ggml_backend_tensor_set(back.seed(), seed.data(), 0, ggml_nbytes(back.seed()));
            }
        };
    }

    // Compute <s, f>, with gradients if requested.
    double run(bool with_gradients) {
        differentiates = with_gradients;
        llama_memory_clear(llama_get_memory(ctx), true);
        llama_batch batch = llama_batch_init(TOKENS, 0, 1);
        for (int i = 0; i < TOKENS; ++i) {
            batch.token[i] = 40 + i % 40, batch.pos[i] = i, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = 0, batch.logits[i] = true;
        }
        batch.n_tokens = TOKENS;
        if (llama_decode(ctx, batch)) {
            throw std::runtime_error("llama_decode");
        }
        llama_synchronize(ctx);
        llama_batch_free(batch);
        if (is_empty || is_full) {
            return 0.0;
        }
        const values result = get(out);
        return result.size() == seed.size() ? dot(seed, result) : 0.0;
    }
};

static std::mt19937 source(1);

static values draw(size_t n, double size = 1.0) {
    std::normal_distribution<float> normal(0.0f, (float) size);
    values result(n);
    for (float & f : result) {
        f = normal(source);
    }
    return result;
}

static void print(const char * before, const char * name, double exact, double difference, double scale) {
    printf("%s\"%s\": [%.9g, %.9g, %.9g]", before, name, exact, difference, scale);
}

// Finite difference of <s, f> along d at a point, which set() moves.
template <class F> static double difference(probe & p, float e, const values & point, const values & d, const F & set) {
    double sides[2];
    for (int side = 0; side < 2; ++side) {
        values moved = point;
        for (size_t i = 0; i < point.size(); ++i) {
            moved[i] += (side ? -e : e)*d[i];
        }
        set(moved);
        sides[side] = p.run(false);
    }
    set(point);
    return (sides[0] - sides[1])/(2*e);
}

// Print the derivative along the gradient of weight matrix w, scaled to the norm of w; g, x: gradients and inputs of its product.
static void print_matrix(probe & p, ggml_tensor * w, const values & g, const values & x) {
    const size_t n_columns = w->ne[0], n_rows = w->ne[1];
    values       d(n_rows*n_columns);
    for (size_t t = 0; t < g.size()/n_rows; ++t) {
        for (size_t i = 0; i < d.size(); ++i) {
            d[i] += g[t*n_rows + i/n_columns]*x[t*n_columns + i%n_columns];
        }
    }
    const values point = get(w);
    const double size = std::sqrt(dot(d, d)), length = std::sqrt(dot(point, point)), exact = size*length;
    for (float & v : d) {
        v *= size > 0 ? length/size : 0.0;
    }
    print(", ", w->name, exact, difference(p, 1.0f/32, point, d, [&](const values & v) { ggml_backend_tensor_set(w, v.data(), 0, ggml_nbytes(w)); }), exact);
}

static void print_layer(probe & p) {
    const values x = p.x, d = draw(x.size());
    const values g = get(p.back.gradient(p.parts.layers()[p.layer].start));
    struct matrix { ggml_tensor * w; values g, x; };
    std::vector<matrix> matrices;
    for (const auto & group : p.parts.layers()[p.layer].groups) {
        for (const auto & product : group.products) {
            if (!group.ids && p.back.gradient(product.node) && product.node->src[0]->type == GGML_TYPE_F32) {
                matrices.push_back({ product.node->src[0], get(p.back.gradient(product.node)), get(group.x) });
            }
        }
    }
    printf("{\"layer\": %d, \"of\": {", p.layer);
    print("", "stream", dot(g, d), difference(p, 1.0f/16, x, d, [&](const values & v) { p.x = v; }), std::sqrt(dot(g, g)*dot(d, d)/(double) g.size()));
    for (const auto & m : matrices) {
        print_matrix(p, m.w, m.g, m.x);
    }
    printf("}}\n");
}

static void print_transposed() {
    ggml_context_ptr owner(ggml_init({ 1 << 20, nullptr, true }));
    ggml_context *   ctx = owner.get();
    ggml_ext::layer  layer;
    layer.start = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 3, 2);
    ggml_set_input(layer.start);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_cont(ctx, ggml_transpose(ctx, ggml_scale(ctx, layer.start, 2.0f))));
    ggml_ext::backward back;
    if (!back.build({ ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph) }, layer)) {
        throw std::runtime_error(back.error());
    }
    back.append(graph);
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(cpu.get())));
    ggml_gallocr_alloc_graph(memory.get(), graph);
    const values seed = { 0, 1, 2, 3, 4, 5 };
    ggml_backend_tensor_set(back.seed(), seed.data(), 0, ggml_nbytes(back.seed()));
    ggml_backend_graph_compute(cpu.get(), graph);
    for (const float g : get(back.gradient(layer.start))) {
        printf("%g\n", g);
    }
}

static void print_boundary() {
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_context_ptr weights(ggml_init({ 1 << 16, nullptr, true }));
    ggml_context_ptr caches(ggml_init({ 1 << 16, nullptr, true }));
    ggml_context_ptr owner(ggml_init({ 1 << 20, nullptr, true }));
    ggml_tensor *    weight = ggml_set_name(ggml_new_tensor_2d(weights.get(), GGML_TYPE_F32, 4, 4), "blk.0.ffn_up.weight");
    ggml_tensor *    cache  = ggml_new_tensor_2d(caches.get(), GGML_TYPE_F32, 4, 2);
    ggml_backend_buffer_ptr weight_buffer(ggml_backend_alloc_ctx_tensors(weights.get(), cpu.get()));
    ggml_backend_buffer_ptr cache_buffer(ggml_backend_alloc_ctx_tensors(caches.get(), cpu.get()));
    ggml_backend_buffer_set_usage(weight_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    ggml_context * ctx   = owner.get();
    ggml_cgraph *  graph = ggml_new_graph(ctx);
    ggml_tensor *  input = ggml_set_name(ggml_mul_mat(ctx, weight, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 4, 2)), "input");
    ggml_build_forward_expand(graph, ggml_cpy(ctx, input, cache));
    ggml_tensor *  middle = ggml_set_name(ggml_relu(ctx, ggml_mul_mat(ctx, weight, input)), "middle");
    ggml_tensor *  out    = ggml_add(ctx, ggml_mul_mat(ctx, weight, middle), ggml_scale(ctx, cache, 2.0f));
    ggml_build_forward_expand(graph, ggml_relu(ctx, out));

    ggml_ext::layered_graph parts;
    if (!parts.read(graph, 1)) {
        throw std::runtime_error(parts.error());
    }
    parts.find_groups(0);
    for (const ggml_tensor * t : parts.find_boundary(0, 2).values) {
        printf("%s\n", t->name);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 1;
    }
    if (!strcmp(argv[1], "--boundary")) {
        print_boundary();
        return 0;
    }
    if (!strcmp(argv[1], "--operations")) {
        print_operations();
        return 0;
    }
    if (!strcmp(argv[1], "--transposed")) {
        print_transposed();
        return 0;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers    = 0;
    model_params.use_extra_bufts = false;
    model_params.load_mode = LLAMA_LOAD_MODE_NONE; // writable memory
    llama_model_ptr      model(llama_model_load_from_file(argv[1], model_params));
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = TOKENS;
    context_params.type_k = context_params.type_v = GGML_TYPE_F32; // rounding would hide the differences
    context_params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context_params.n_threads = context_params.n_threads_batch = 2;
    llama_context_ptr ctx(llama_init_from_model(model.get(), context_params));
    if (!ctx) {
        return 1;
    }
    probe p;
    p.ctx = ctx.get();
    p.n_layers = llama_model_n_layer(model.get());
    ggml_ext_set_graph_cut([&](ggml_cgraph * graph) { return p.on_graph(graph); });
    p.is_empty = true; // ggml plans the memory of a graph again if the last one had another size
    p.run(false);
    p.is_empty = false, p.is_full = true;
    p.run(false);
    p.is_full = false;
    for (const ggml_tensor * t : p.parts.selections()) {
        p.selections.emplace_back(ggml_nelements(t));
        ggml_backend_tensor_get(t, p.selections.back().data(), 0, ggml_nbytes(t));
    }
    const size_t n_values = ggml_nelements(p.parts.layers()[0].end);
    for (p.layer = 1; p.layer <= p.n_layers; ++p.layer) {
        p.x = draw(n_values);
        p.run(false);
        p.seed = draw(ggml_nelements(p.out));
        p.run(true);
        if (!p.refusal.empty()) {
            printf("{\"refused\": \"%s\"}\n", p.refusal.c_str());
            break;
        }
        print_layer(p);
    }
    ggml_ext_set_graph_cut({});
    return 0;
}
