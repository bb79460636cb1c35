// How a model's graph uses its tensors, and whether the model runs. Called by py/ggml_ext/_native/graph.py.
//
// Usage: ggml-ext-graph uses FILE ...   build the graphs without reading weights. Print a line per use of a tensor: NAME, a tab, and
//                                       "product" (the matrix of a product, whose input llama-imatrix collects), "rows" (looked up by
//                                       index) or the name of another operation
//        ggml-ext-graph run FILE ...    load the model and run one token. Exit code 2 if the result is not finite
//
// FILEs are the parts of one model in order. Both commands use the CPU only.

#include "llama-graph-cut.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

const ggml_tensor * skip_views(const ggml_tensor * t) {
    while (t && (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE)) {
        t = t->src[0];
    }
    return t;
}

bool is_view(const ggml_tensor * t) { return skip_views(t) != t; }

struct tensor_uses {
    std::set<std::pair<std::string, std::string>> entries;

    void read(ggml_cgraph * graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            for (int s = 0; s < GGML_MAX_SRC && !is_view(node); ++s) {
                const ggml_tensor * source = node->src[s], * leaf = skip_views(source);
                if (leaf && leaf->op == GGML_OP_NONE) {
                    entries.emplace(leaf->name, describe(node, s, leaf == source));
                }
            }
        }
    }

    static const char * describe(const ggml_tensor * node, int s, bool is_direct) {
        const bool is_product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        return s == 0 && is_direct && is_product                    ? "product" :
               s == 0 && is_direct && node->op == GGML_OP_GET_ROWS ? "rows" :
                                                                      ggml_op_name(node->op);
    }
};

struct loaded_model {
    llama_model *   model = nullptr;
    llama_context * ctx   = nullptr;

    loaded_model(std::vector<const char *> files, bool with_weights) {
        ggml_backend_dev_t no_devices[] = { nullptr };
        llama_model_params model_params = llama_model_default_params();
        model_params.devices      = no_devices;
        model_params.n_gpu_layers = 0;
        model_params.no_alloc     = !with_weights;
        model_params.load_mode    = with_weights ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
        model = llama_model_load_from_splits(files.data(), files.size(), model_params);
        if (!model) {
            return;
        }
        llama_context_params context_params = llama_context_default_params();
        context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = 64;
        context_params.embeddings = true; // adds pooling and a reranker's head to the graph
        ctx = llama_init_from_model(model, context_params);
    }
    ~loaded_model() {
        if (ctx) {
            llama_free(ctx);
        }
        if (model) {
            llama_model_free(model);
        }
    }
};

int run(llama_model * model, llama_context * ctx) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const bool is_encoder = llama_pooling_type(ctx) != LLAMA_POOLING_TYPE_NONE || !llama_model_has_decoder(model);
    llama_set_embeddings(ctx, is_encoder);
    llama_token token = std::max(0, llama_vocab_bos(vocab));
    if (llama_model_has_encoder(model)) {
        if (llama_encode(ctx, llama_batch_get_one(&token, 1))) {
            return 1;
        }
        token = std::max(0, llama_model_decoder_start_token(model));
    }
    if (llama_model_has_decoder(model) && llama_decode(ctx, llama_batch_get_one(&token, 1))) {
        return 1;
    }
    const float * values = is_encoder ? llama_get_embeddings_seq(ctx, 0) : llama_get_logits_ith(ctx, -1);
    const int n = llama_pooling_type(ctx) == LLAMA_POOLING_TYPE_RANK ? (int) llama_model_n_cls_out(model) :
                  is_encoder                                         ? llama_model_n_embd_out(model) :
                                                                       llama_vocab_n_tokens(vocab);
    for (int i = 0; values && i < n; ++i) {
        if (!std::isfinite(values[i])) {
            fprintf(stderr, "error: value %d of %d that the model gives is %g\n", i, n, values[i]);
            return 2;
        }
    }
    return 0;
}

}

int main(int argc, char ** argv) {
    const std::string command = argc > 2 ? argv[1] : "";
    if (command != "uses" && command != "run") {
        fprintf(stderr, "error: use: %s uses FILE ..., or run FILE ...\n", argv[0]);
        return 1;
    }
    ggml_backend_load_all();
    llama_backend_init();
    tensor_uses uses;
    if (command == "uses") {
        ggml_ext_set_graph_cut([&](ggml_cgraph * graph) {
            uses.read(graph);
            return [] {};
        });
    }
    int code = 1;
    {
        const loaded_model loaded({ argv + 2, argv + argc }, command == "run");
        if (loaded.ctx) {
            code = command == "run" ? run(loaded.model, loaded.ctx) : 0;
        }
    }
    ggml_ext_set_graph_cut({});
    if (code == 0) {
        for (const auto & [name, use] : uses.entries) {
            printf("%s\t%s\n", name.c_str(), use.c_str());
        }
    }
    llama_backend_free();
    return code;
}
