// --act-prec, as libllama and its programs need it: the option's names, the devices that know it, and the mark on a graph's
// products (docs/reference/act-prec.md). What the mark means: ggml-ext-act-prec.h.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ggml-backend.h"
#include "ggml-ext-act-prec.h"
#include "llama.h"

inline const char * ggml_ext_act_prec_name(enum llama_act_prec act_prec) { return act_prec == LLAMA_ACT_PREC_F16 ? "f16" : "q8"; }

// Ends the program where value is neither: upstream's way would print the option's usage too.
inline enum llama_act_prec ggml_ext_parse_act_prec(const std::string & value) {
    for (enum llama_act_prec act_prec : {LLAMA_ACT_PREC_Q8, LLAMA_ACT_PREC_F16}) {
        if (value == ggml_ext_act_prec_name(act_prec)) {
            return act_prec;
        }
    }
    fprintf(stderr, "error: --act-prec %s: unknown precision; q8 and f16 are known\n", value.c_str());
    std::exit(1);
}

// For programs without the option, such as llama-bench: what a context begins with. context: of llama-context.h. Those with the option
// set it after this, to what the command line says or to the same.
template <class Context> void ggml_ext_act_prec_of_environment(Context & context) {
    const char * value = std::getenv("LLAMA_ARG_ACT_PREC");
    if (value && !context.set_act_prec(ggml_ext_parse_act_prec(value))) {
        throw std::runtime_error(std::string("LLAMA_ARG_ACT_PREC=") + value);
    }
}

// Why not, where a product would be computed with 8-bit activations all the same, or with steps that a residual cannot mend: by
// another backend than the CPU's, CUDA's or BLAS, which multiplies in F32, or by weights in a layout of KleidiAI or SpacemiT, whose kernels
// give whole rows of activations one scale. Empty where nothing is in the way. model: of llama-model.h.
template <class Backends, class Model> std::string ggml_ext_refuse_act_prec(const Backends & backends, const Model & model) {
    for (const auto & backend : backends) {
        ggml_backend_dev_t dev  = ggml_backend_get_device(backend.get());
        const std::string  name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        if (name != "CPU" && name != "CUDA" && name != "BLAS") {
            return std::string(ggml_backend_dev_name(dev)) + ": the " + name +
                   " backend knows 8-bit activations alone; use --device none, or --act-prec q8";
        }
    }
    for (const auto & [name, tensor] : model.tensors_by_name) {
        const std::string buffer = tensor->buffer ? ggml_backend_buffer_name(tensor->buffer) : "";
        if (buffer.find("KLEIDIAI") != std::string::npos || buffer.find("SPACEMIT") != std::string::npos) {
            return name + " lies in " + buffer + ", whose kernels know 8-bit activations alone; use --no-repack, or --act-prec q8";
        }
    }
    return "";
}

// Whether a product's first factor is a weight of the model, or a view of one: a quantized K cache is none.
inline bool ggml_ext_multiplies_weights(const struct ggml_tensor * node) {
    const struct ggml_tensor * root = node->src[0]->view_src ? node->src[0]->view_src : node->src[0];
    return root->buffer && ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Marks the graph's products with quantized weights, but for those that a model has marked as too large for half floats: they go to
// devices that do not mind.
inline void ggml_ext_set_act_prec(struct ggml_cgraph * graph, enum llama_act_prec act_prec) {
    if (act_prec != LLAMA_ACT_PREC_F16) {
        return;
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if ((node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && ggml_ext_can_split_activations(node) &&
            node->op_params[3] != GGML_PREC_F32 && ggml_ext_multiplies_weights(node)) {
            ggml_prec_set_src(node, GGML_PREC_F16, 1);
        }
    }
}
