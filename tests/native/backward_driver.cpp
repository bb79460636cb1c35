// Gradients of a model's layers (streams/backward.h) against differences of what the layers compute.
//
//     ggml-ext-backward MODEL
//     ggml-ext-backward --transposed
//
// The first prints a line of JSON for each layer but the first: {"layer": N, "of": {NAME: [exact, difference, scale]}}, or {"refused": why}. For a random
// seed s behind the layer, f of all that it computes, and a direction d with gradients g, exact is <g, d>, difference
// (<s, f(e d)> - <s, f(-e d)>)/2e for a small e. NAME "stream": d is random, of the stream before the layer, and the scale |g||d|/sqrt(n), which exact
// is about. Else NAME is that of a weight matrix, but those of experts; d is along its gradient, the sum of g x^T over the tokens, and the scale is exact.
// The second prints the gradient of a stream that is scaled by 2, and whose rows and columns are exchanged then: 6 values, of the seed 0 ... 5.
#include "streams/backward.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

#include "ggml-backend.h"
#include "hooks/llama-graph-cut.h"
#include "llama-cpp.h"

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
    values found(ggml_nelements(t));
    ggml_ext::get_rows(t, found.data());
    return found;
}

struct probe {
    llama_context *          ctx = nullptr;
    int                      n_layers = 0, layer = 0;
    values                   x, seed;
    bool                     differentiates = false;
    std::string              refused;
    ggml_ext::layered_graph  parts;
    ggml_ext::backward       back;
    ggml_tensor *            out = nullptr;

    std::function<void()> on_graph(ggml_cgraph * graph) {
        parts = {};
        if (!parts.read(graph, n_layers)) {
            throw std::runtime_error(parts.why());
        }
        const auto & of    = parts.layers()[layer];
        const auto   nodes = parts.nodes(layer);
        parts.find_groups(layer);
        std::vector<ggml_tensor *> targets = { out = nodes.back() };
        for (const auto & g : of.groups) {
            targets.push_back(g.x);
        }
        if (!parts.cut(layer, targets, {})) {
            throw std::runtime_error(parts.why());
        }
        if (differentiates) {
            back = {};
            if (back.build(nodes, of)) {
                back.append(graph);
            } else {
                refused = back.why();
            }
        }
        return [this, start = of.start] {
            ggml_backend_tensor_set(start, x.data(), 0, ggml_nbytes(start));
            if (differentiates && refused.empty()) {
                ggml_backend_tensor_set(back.seed(), seed.data(), 0, ggml_nbytes(back.seed()));
            }
        };
    }

    // <s, f>, with gradients on the way if they are asked for.
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
        const values found = get(out);
        return found.size() == seed.size() ? dot(seed, found) : 0.0;
    }
};

static std::mt19937 source(1);

static values draw(size_t n, double size = 1.0) {
    std::normal_distribution<float> normal(0.0f, (float) size);
    values to(n);
    for (float & f : to) {
        f = normal(source);
    }
    return to;
}

static void print(const char * before, const char * name, double exact, double difference, double scale) {
    printf("%s\"%s\": [%.9g, %.9g, %.9g]", before, name, exact, difference, scale);
}

// Of <s, f> with at + e d and at - e d, which set() takes.
template <class F> static double difference(probe & p, float e, const values & at, const values & d, const F & set) {
    double sides[2];
    for (int side = 0; side < 2; ++side) {
        values moved = at;
        for (size_t i = 0; i < at.size(); ++i) {
            moved[i] += (side ? -e : e)*d[i];
        }
        set(moved);
        sides[side] = p.run(false);
    }
    set(at);
    return (sides[0] - sides[1])/(2*e);
}

// Along the gradient of one weight matrix w, as long as w is; g, x: gradients and inputs of its product.
static void print_matrix(probe & p, ggml_tensor * w, const values & g, const values & x) {
    const size_t n_columns = w->ne[0], n_rows = w->ne[1];
    values       d(n_rows*n_columns);
    for (size_t t = 0; t < g.size()/n_rows; ++t) {
        for (size_t i = 0; i < d.size(); ++i) {
            d[i] += g[t*n_rows + i/n_columns]*x[t*n_columns + i%n_columns];
        }
    }
    const values at = get(w);
    const double size = std::sqrt(dot(d, d)), length = std::sqrt(dot(at, at)), exact = size*length;
    for (float & v : d) {
        v *= size > 0 ? length/size : 0.0;
    }
    print(", ", w->name, exact, difference(p, 1.0f/32, at, d, [&](const values & v) { ggml_backend_tensor_set(w, v.data(), 0, ggml_nbytes(w)); }), exact);
}

static void print_layer(probe & p) {
    const values x = p.x, d = draw(x.size());
    const values g = get(p.back.of(p.parts.layers()[p.layer].start));
    struct matrix { ggml_tensor * w; values g, x; };
    std::vector<matrix> matrices;
    for (const auto & group : p.parts.layers()[p.layer].groups) {
        for (const auto & product : group.products) {
            if (!group.ids && p.back.of(product.node) && product.node->src[0]->type == GGML_TYPE_F32) {
                matrices.push_back({ product.node->src[0], get(p.back.of(product.node)), get(group.x) });
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
    ggml_ext::layer  of;
    of.start = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 3, 2);
    ggml_set_input(of.start);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_cont(ctx, ggml_transpose(ctx, ggml_scale(ctx, of.start, 2.0f))));
    ggml_ext::backward back;
    if (!back.build({ ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph) }, of)) {
        throw std::runtime_error(back.why());
    }
    back.append(graph);
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(cpu.get())));
    ggml_gallocr_alloc_graph(memory.get(), graph);
    const values seed = { 0, 1, 2, 3, 4, 5 };
    ggml_backend_tensor_set(back.seed(), seed.data(), 0, ggml_nbytes(back.seed()));
    ggml_backend_graph_compute(cpu.get(), graph);
    for (const float g : get(back.of(of.start))) {
        printf("%g\n", g);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 1;
    }
    if (!strcmp(argv[1], "--transposed")) {
        print_transposed();
        return 0;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers    = 0;
    of_model.use_extra_bufts = false;
    of_model.load_mode = LLAMA_LOAD_MODE_NONE; // memory that can be written
    llama_model_ptr      model(llama_model_load_from_file(argv[1], of_model));
    llama_context_params of_context = llama_context_default_params();
    of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = TOKENS;
    of_context.type_k = of_context.type_v = GGML_TYPE_F32; // rounding would drown the differences
    of_context.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    of_context.n_threads = of_context.n_threads_batch = 2;
    llama_context_ptr ctx(llama_init_from_model(model.get(), of_context));
    if (!ctx) {
        return 1;
    }
    probe p;
    p.ctx = ctx.get();
    p.n_layers = llama_model_n_layer(model.get());
    ggml_ext_set_graph_cut([&](ggml_cgraph * graph) { return p.on_graph(graph); });
    for (p.layer = 1; p.layer <= p.n_layers; ++p.layer) {
        p.x = draw((size_t) TOKENS*llama_model_n_embd(model.get()));
        p.run(false);
        p.seed = draw(ggml_nelements(p.out));
        p.run(true);
        if (!p.refused.empty()) {
            printf("{\"refused\": \"%s\"}\n", p.refused.c_str());
            break;
        }
        print_layer(p);
    }
    ggml_ext_set_graph_cut({});
    return 0;
}
