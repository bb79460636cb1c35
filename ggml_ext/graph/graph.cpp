// How a model's graph uses its tensors, and whether the model runs. Called by py/ggml_ext/_native/graph.py.
//
// Usage: ggml-ext-graph uses FILE ...   build the graphs without reading weights. Print a line per use of a tensor: NAME, a tab, and
//                                       "product" (the matrix of a product, whose input llama-imatrix collects), "rows" (looked up by
//                                       index) or the name of another operation
//        ggml-ext-graph mtp FILE ...    the same for the graphs of the layers that predict further tokens (MTP). Exit code 1 if llama.cpp has none
//        ggml-ext-graph run FILE ...    load the model and run one token. Exit code 2 if the result is not finite
//        ggml-ext-graph scales FILE ... find the products whose columns can be scaled (column-scales.h), and run them scaled. Print a line per
//                                       group: "group", or "inexact" if the results differ with it, consumers, producers, block and repeat;
//                                       fields are separated by tabs, names by commas
//
// FILEs are the parts of one model in order. All commands use the CPU only.

#include "column-scales.h"
#include "llama-graph-cut.h"
#include "views.h"

#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct tensor_uses {
    std::set<std::pair<std::string, std::string>> entries;
    bool                                          can_run = true;

    void read(ggml_cgraph * graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            can_run &= node->op != GGML_OP_ROPE || has_sections(node);
            for (int s = 0; s < GGML_MAX_SRC && !ggml_ext::is_view(node); ++s) {
                const ggml_tensor * source = node->src[s], * leaf = ggml_ext::skip_views(source);
                if (leaf && leaf->op == GGML_OP_NONE) {
                    entries.emplace(leaf->name, describe(node, s, leaf == source));
                }
            }
        }
    }

    // ggml ends the program if multimodal RoPE has no sections, as in the MTP layer of GLM-4.5V.
    static bool has_sections(const ggml_tensor * rope) {
        const int32_t * params = rope->op_params;
        return !(params[2] & GGML_ROPE_TYPE_MROPE) || params[11] > 0 || params[12] > 0 || params[13] > 0;
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
    void *          run   = nullptr; // a ggml_ext::scaled_run, or none

    loaded_model(std::vector<const char *> files, bool with_weights, bool of_mtp) {
        ggml_backend_dev_t no_devices[] = { nullptr };
        llama_model_params model_params = llama_model_default_params();
        model_params.devices      = no_devices;
        model_params.n_gpu_layers = 0;
        model_params.no_alloc     = !with_weights;
        model_params.use_extra_bufts = false; // they would copy the weights
        model_params.load_mtp        = of_mtp;
        model_params.load_mode    = with_weights ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
        model = llama_model_load_from_splits(files.data(), files.size(), model_params);
        if (!model) {
            return;
        }
        llama_context_params context_params = llama_context_default_params();
        context_params.n_threads = context_params.n_threads_batch = (int) std::thread::hardware_concurrency();
        context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = 64;
        context_params.embeddings = !of_mtp; // adds pooling and a reranker's head to the graph
        context_params.ctx_type   = of_mtp ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
        context_params.cb_eval           = evaluate;
        context_params.cb_eval_user_data = this;
        ctx = llama_init_from_model(model, context_params);
        for (int i = 0; ctx && of_mtp && i < llama_model_n_layer_nextn(model); ++i) {
            llama_set_nextn_layer_offset(ctx, i);
            llama_graph_reserve(ctx, 1, 1, 1);
        }
    }
    ~loaded_model() {
        if (ctx) {
            llama_free(ctx);
        }
        if (model) {
            llama_model_free(model);
        }
    }

    static bool evaluate(ggml_tensor * node, bool is_before, void * loaded) {
        void * run = ((const loaded_model *) loaded)->run;
        return run ? ggml_ext::scaled_run::evaluate(node, is_before, run) : !is_before;
    }
};

// Run tokens through the model and return the values that it gives for the last one. False if that fails.
bool compute(llama_model * model, llama_context * ctx, std::vector<llama_token> tokens, std::vector<float> & out) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const bool is_encoder = llama_pooling_type(ctx) != LLAMA_POOLING_TYPE_NONE || !llama_model_has_decoder(model);
    llama_set_embeddings(ctx, is_encoder);
    if (llama_model_has_encoder(model)) {
        if (llama_encode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size()))) {
            return false;
        }
        tokens.assign(1, std::max(0, llama_model_decoder_start_token(model)));
    }
    if (llama_model_has_decoder(model) && llama_decode(ctx, llama_batch_get_one(tokens.data(), (int32_t) tokens.size()))) {
        return false;
    }
    const float * values = is_encoder ? llama_get_embeddings_seq(ctx, 0) : llama_get_logits_ith(ctx, -1);
    const int n = llama_pooling_type(ctx) == LLAMA_POOLING_TYPE_RANK ? (int) llama_model_n_cls_out(model) :
                  is_encoder                                         ? llama_model_n_embd_out(model) :
                                                                       llama_vocab_n_tokens(vocab);
    out.assign(values, values + (values ? n : 0));
    return true;
}

int run(llama_model * model, llama_context * ctx) {
    std::vector<float> values;
    if (!compute(model, ctx, { std::max(0, llama_vocab_bos(llama_model_get_vocab(model))) }, values)) {
        return 1;
    }
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) {
            fprintf(stderr, "error: value %zu of %zu that the model gives is %g\n", i, values.size(), values[i]);
            return 2;
        }
    }
    return 0;
}

using scale_groups = std::vector<ggml_ext::scale_group>;

// The largest error of the results, relative to their energy, with which a group counts as exact. Powers of two change only the rounding of
// subnormal halves in the cache (3e-8 on SmolLM2-135M-Instruct, 0 on the reference model).
constexpr double EXACT = 1e-6;
constexpr int    N_TOKENS = 32;

// Return the error of the model's results if the groups are scaled, relative to the energy of the original ones; infinite if it does not run.
double scaling_error(loaded_model & loaded, const std::vector<float> & original, const std::vector<llama_token> & tokens, const scale_groups & groups) {
    std::vector<float> values;
    bool               has_run;
    {
        ggml_ext::scaled_run run(groups);
        llama_memory_clear(llama_get_memory(loaded.ctx), true);
        loaded.run = &run;
        has_run    = compute(loaded.model, loaded.ctx, tokens, values);
        loaded.run = nullptr;
    }
    double error = 0, energy = 0;
    for (size_t i = 0; has_run && i < values.size(); ++i) {
        if (original[i] < -1e30f) {
            continue; // a token that the graph rules out
        }
        error += std::pow(values[i] - original[i], 2);
        energy += std::pow(original[i], 2);
    }
    return has_run && energy > 0 && std::isfinite(error) ? error / energy : INFINITY;
}

// Join names, without the number of the layer if is_class.
std::string join(const std::vector<ggml_tensor *> & tensors, bool is_class = false) {
    std::string out;
    for (const ggml_tensor * t : tensors) {
        int n = 0, length = 0;
        const bool in_layer = is_class && sscanf(t->name, "blk.%d.%n", &n, &length) == 1;
        out += (out.empty() ? "" : ",") + std::string(t->name + (in_layer ? length : 0));
    }
    return out;
}

int print_scales(loaded_model & loaded, const scale_groups & groups) {
    const int                n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(loaded.model));
    std::vector<llama_token> tokens;
    for (uint32_t i = 0; i < N_TOKENS; ++i) {
        tokens.push_back((llama_token) (i * 2654435761u % (uint32_t) n_vocab));
    }
    std::vector<float> original;
    if (!compute(loaded.model, loaded.ctx, tokens, original)) {
        return 1;
    }
    std::map<std::string, scale_groups> classes;
    for (const auto & group : groups) {
        classes[join(group.consumers, true) + ">" + join(group.producers, true)].push_back(group);
    }
    const bool are_all_exact = scaling_error(loaded, original, tokens, groups) <= EXACT;
    for (const auto & entry : classes) {
        const bool is_exact = are_all_exact || scaling_error(loaded, original, tokens, entry.second) <= EXACT;
        for (const auto & g : entry.second) {
            printf("%s\t%s\t%s\t%lld\t%lld\n", is_exact ? "group" : "inexact", join(g.consumers).c_str(), join(g.producers).c_str(),
                   (long long) g.block, (long long) g.repeat);
        }
    }
    return 0;
}

}

int main(int argc, char ** argv) {
    const std::string command = argc > 2 ? argv[1] : "";
    const bool reads_uses = command == "uses" || command == "mtp";
    if (!reads_uses && command != "run" && command != "scales") {
        fprintf(stderr, "error: use: %s uses, mtp, run or scales, and FILE ...\n", argv[0]);
        return 1;
    }
    ggml_backend_load_all();
    llama_backend_init();
    tensor_uses  uses;
    scale_groups groups;
    if (command != "run") {
        ggml_ext_set_graph_cut([&](ggml_cgraph * graph) {
            if (reads_uses) {
                uses.read(graph);
            } else {
                groups = ggml_ext::find_scale_groups(graph); // those of the last graph count
            }
            return [] {};
        });
    }
    int code = 1;
    {
        loaded_model loaded({ argv + 2, argv + argc }, !reads_uses, command == "mtp");
        ggml_ext_set_graph_cut({});
        if (loaded.ctx) {
            code = command == "run" ? run(loaded.model, loaded.ctx) : command == "scales" ? print_scales(loaded, groups) : 0;
        }
    }
    if (command == "mtp" && !uses.can_run) {
        code = 1;
    }
    if (code == 0 && reads_uses) {
        for (const auto & [name, use] : uses.entries) {
            printf("%s\t%s\n", name.c_str(), use.c_str());
        }
    }
    llama_backend_free();
    return code;
}
