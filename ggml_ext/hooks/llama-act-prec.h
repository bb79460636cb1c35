// --act-prec for libllama and its programs (docs/reference/act-prec.md): parse the option, check the devices, mark the products of a
// graph. ggml-ext-act-prec.h defines the mark.
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

// Exits on an unknown value: an exception would make upstream print the usage too.
inline enum llama_act_prec ggml_ext_parse_act_prec(const std::string & value) {
    for (enum llama_act_prec act_prec : {LLAMA_ACT_PREC_Q8, LLAMA_ACT_PREC_F16}) {
        if (value == ggml_ext_act_prec_name(act_prec)) {
            return act_prec;
        }
    }
    fprintf(stderr, "error: --act-prec %s: unknown precision; use q8 or f16\n", value.c_str());
    std::exit(1);
}

// Set the precision of a new llama_context from the environment, for programs without the option, such as llama-bench. Programs with
// the option then override it.
template <class Context> void ggml_ext_set_act_prec_from_env(Context & context) {
    const char * value = std::getenv("LLAMA_ARG_ACT_PREC");
    if (value && !context.set_act_prec(ggml_ext_parse_act_prec(value))) {
        throw std::runtime_error(std::string("LLAMA_ARG_ACT_PREC=") + value);
    }
}

// Return why f16 is not supported, or an empty string. Only CPU, CUDA and BLAS (which multiplies in F32) support it. Weights in a layout
// of KleidiAI or SpacemiT do not: their kernels have one scale per row of activations, too coarse for the residual.
template <class Backends, class Model> std::string ggml_ext_check_act_prec(const Backends & backends, const Model & model) {
    for (const auto & backend : backends) {
        ggml_backend_dev_t dev  = ggml_backend_get_device(backend.get());
        const std::string  name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        if (name != "CPU" && name != "CUDA" && name != "BLAS") {
            return std::string(ggml_backend_dev_name(dev)) + ": the " + name +
                   " backend supports only 8-bit activations; use --device none or --act-prec q8";
        }
    }
    for (const auto & [name, tensor] : model.tensors_by_name) {
        const std::string buffer = tensor->buffer ? ggml_backend_buffer_name(tensor->buffer) : "";
        if (buffer.find("KLEIDIAI") != std::string::npos || buffer.find("SPACEMIT") != std::string::npos) {
            return name + " is in " + buffer + ", whose kernels support only 8-bit activations; use --no-repack or --act-prec q8";
        }
    }
    return "";
}

// Whether src[0] is a weight of the model or a view of one, not a quantized K cache.
inline bool ggml_ext_multiplies_weights(const struct ggml_tensor * node) {
    const struct ggml_tensor * root = node->src[0]->view_src ? node->src[0]->view_src : node->src[0];
    return root->buffer && ggml_backend_buffer_get_usage(root->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Mark the graph's products with quantized weights, except those that the model marks as too large for halves (GGML_PREC_F32).
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
