// llama-quantize's rules for py/ggml_ext/_rules.py: which tensors it changes and which type it gives them. Included at the end of
// llama-quant.cpp, where those rules are static. Nothing is read but what the caller passes.
#pragma once

// llama.cpp tells the log of each fallback; the quantizer groups them.
struct ggml_ext_quiet_log {
    ggml_log_callback callback;
    void * user_data;

    ggml_ext_quiet_log() {
        llama_log_get(&callback, &user_data);
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    }
    ~ggml_ext_quiet_log() { llama_log_set(callback, user_data); }
};

// A model as the rules see it: of our file types they ask for the architecture and the number of experts alone.
static std::unique_ptr<llama_model> ggml_ext_rules_model(const char * arch, uint32_t n_expert) {
    std::unique_ptr<llama_model> model(llama_model_create(LLM_ARCH_LLAMA, llama_model_default_params()));
    model->arch = llm_arch_from_string(arch); // not every architecture has a class, and an unknown one has general rules
    model->hparams.n_expert    = n_expert;
    model->hparams.n_layer_all = LLAMA_MAX_LAYERS; // decides nothing for our types, but layers beyond it are refused
    return model;
}

extern "C" {

// Types of all tensors of a model in a file of one of our types, before overrides and before the length of rows is looked at.
//   arch          general.architecture; *is_known tells whether this llama.cpp has it
//   token_embd, output  what --token-embedding-type and --output-tensor-type say, or -1
//   names, ne     of all tensors of the model: whether there is an output.weight matters to the embeddings
//   types         receives a type, or -1 for a tensor that keeps its own
// False with the reason in error, which names the tensor.
LLAMA_API bool ggml_ext_rule_types(const char * arch, uint32_t n_expert, int ftype, int token_embd, int output, size_t n_tensors,
                                   const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS], int32_t * types,
                                   bool * is_known, char * error, size_t error_size);

// What a stock type falls back to for rows of n_per_row, which are no multiple of its block; -1 if there is no rule.
LLAMA_API int ggml_ext_rule_fallback(int type, int64_t n_per_row);

}

static void ggml_ext_compute_rule_types(const char * arch, uint32_t n_expert, const llama_model_quantize_params & params,
                                        size_t n_tensors, const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS],
                                        int32_t * types, bool * is_known) {
    const ggml_type type = (ggml_type) params.ftype; // ids of files and tensors are the same
    switch (type) {
        GGML_EXT_WEIGHT_CASES break;
        default: // which asks for more of the model
            throw std::runtime_error(format("file type %d is none of ggml-ext", params.ftype));
    }
    const auto model = ggml_ext_rules_model(arch, n_expert);
    *is_known = model->arch != LLM_ARCH_UNKNOWN;

    quantize_state_impl qs(*model, &params);
    std::vector<tensor_metadata> metadata(n_tensors);
    for (size_t i = 0; i < n_tensors; ++i) {
        metadata[i].name = names[i];
    }
    init_quantize_state_counters(qs, metadata);
    for (size_t i = 0; i < n_tensors; ++i) {
        ggml_tensor tensor = {};
        tensor.type = GGML_TYPE_F32; // the rules look at names and shapes
        std::copy(ne[i], ne[i] + GGML_MAX_DIMS, tensor.ne);
        ggml_set_name(&tensor, names[i]);
        types[i] = !tensor_allows_quantization(&params, model->arch, &tensor) ? -1 :
            (int32_t) llama_tensor_get_type_impl(qs, type, &tensor, params.ftype, metadata[i].category);
    }
}

bool ggml_ext_rule_types(const char * arch, uint32_t n_expert, int ftype, int token_embd, int output, size_t n_tensors,
                         const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS], int32_t * types,
                         bool * is_known, char * error, size_t error_size) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype                = (llama_ftype) ftype;
    params.token_embedding_type = token_embd < 0 ? GGML_TYPE_COUNT : (ggml_type) token_embd;
    params.output_tensor_type   = output     < 0 ? GGML_TYPE_COUNT : (ggml_type) output;
    try {
        ggml_ext_compute_rule_types(arch, n_expert, params, n_tensors, names, ne, types, is_known);
    } catch (const std::exception & e) {
        snprintf(error, error_size, "%s", e.what());
        return false;
    }
    return true;
}

int ggml_ext_rule_fallback(int type, int64_t n_per_row) {
    const ggml_ext_quiet_log quiet;
    try {
        const auto model = ggml_ext_rules_model("", 0);
        const llama_model_quantize_params params = llama_model_quantize_default_params();
        quantize_state_impl qs(*model, &params);
        ggml_tensor tensor = {};
        tensor.ne[0] = n_per_row;
        return tensor_type_fallback(qs, &tensor, (ggml_type) type);
    } catch (const std::exception &) {
        return -1;
    }
}
