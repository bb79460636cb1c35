// llama-quantize's rules for py/ggml_ext/_plan/rules.py: which tensors it quantizes, and to which types. Included at the end of
// llama-quant.cpp, whose rules are static. It reads only its arguments.
#pragma once

// Suppresses llama.cpp's log lines for each fallback; the quantizer reports them in groups.
struct ggml_ext_quiet_log {
    ggml_log_callback callback;
    void * user_data;

    ggml_ext_quiet_log() {
        llama_log_get(&callback, &user_data);
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    }
    ~ggml_ext_quiet_log() { llama_log_set(callback, user_data); }
};

extern "C" {

// Properties of a model that the rules need besides its tensors.
struct ggml_ext_rule_model {
    const char * arch;      // general.architecture
    uint32_t     n_layer;   // 0 for architectures without, such as clip; at most LLAMA_MAX_LAYERS
    uint32_t     n_head;    // first layer, also n_head_kv
    uint32_t     n_head_kv;
    uint32_t     n_expert;
};

// Properties of the output file.
struct ggml_ext_rule_file {
    int  ftype;       // enum llama_ftype; for ggml-ext types the id of the type
    int  token_embd;  // --token-embedding-type and --output-tensor-type, or -1
    int  output;
    bool has_imatrix;
};

// Choose the types of all tensors of a model, before fallbacks for the row size.
//   names, ne     all tensors of the model: the rule for embeddings depends on whether there is an output.weight
//   is_named      tensors that --tensor-type names: not counted, as in llama-quantize; their result is not used
//   types         result: a type, or -1 for a tensor that keeps its own
//   is_known      result: whether this llama.cpp has the architecture
// Returns false on errors, with a reason in error that names the tensor.
LLAMA_API bool ggml_ext_file_rule_types(const ggml_ext_rule_model * model, const ggml_ext_rule_file * file, size_t n_tensors,
                                        const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS], const bool * is_named,
                                        int32_t * types, bool * is_known, char * error, size_t error_size);

// Get the fallback of an upstream type for rows of n_per_row, which its block size does not divide; -1 if there is no rule.
LLAMA_API int ggml_ext_rule_fallback(int type, int64_t n_per_row);

}

// Whether the loader would set LLM_TYPE_70B, the only model type that the rules test. Repeats load_arch_hparams() in src/models, which
// aborts on damaged values.
static bool ggml_ext_is_70b(llm_arch arch, const ggml_ext_rule_model & model) {
    switch (arch) {
        case LLM_ARCH_LLAMA:
        case LLM_ARCH_LLAMA_EMBED: return model.n_layer == 80 && model.n_head != model.n_head_kv;
        case LLM_ARCH_QWEN2:
        case LLM_ARCH_DECI:
        case LLM_ARCH_OLMO:        return model.n_layer == 80;
        case LLM_ARCH_JAIS2:       return model.n_layer == 68;
        default:                   return false;
    }
}

static std::unique_ptr<llama_model> ggml_ext_make_model(const ggml_ext_rule_model & info) {
    std::unique_ptr<llama_model> model(llama_model_create(LLM_ARCH_LLAMA, llama_model_default_params()));
    model->arch = llm_arch_from_string(info.arch); // unknown architectures use the general rules
    model->type = ggml_ext_is_70b(model->arch, info) ? LLM_TYPE_70B : LLM_TYPE_UNKNOWN;
    model->hparams.n_expert         = info.n_expert;
    model->hparams.n_layer_all      = std::max(1u, info.n_layer); // n_head() aborts without layers
    model->hparams.n_head_arr[0]    = info.n_head;
    model->hparams.n_head_kv_arr[0] = info.n_head_kv;
    return model;
}

static bool ggml_ext_is_file_type(int ftype) {
    switch (ftype) {
        GGML_EXT_WEIGHT_CASES return true; // file types have the ids of tensor types
        default:              return false;
    }
}

static void ggml_ext_compute_rule_types(ggml_ext_rule_model info, const llama_model_quantize_params & params, bool has_imatrix,
                                        size_t n_tensors, const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS],
                                        const bool * is_named, int32_t * types, bool * is_known) {
    const ggml_type default_type = llama_ftype_get_default_type(params.ftype);
    if (default_type == GGML_TYPE_COUNT || !ggml_is_quantized(default_type)) {
        throw std::runtime_error(format("file type %d is not quantized", params.ftype));
    }
    if (ggml_ext_is_file_type(params.ftype)) {
        info.n_layer = LLAMA_MAX_LAYERS; // not used for ggml-ext types; avoids the check below
    }
    if (info.n_layer > LLAMA_MAX_LAYERS) {
        throw std::runtime_error(format("%u layers exceed the limit of %d", info.n_layer, LLAMA_MAX_LAYERS));
    }
    const auto model = ggml_ext_make_model(info);
    *is_known = model->arch != LLM_ARCH_UNKNOWN;

    quantize_state_impl qs(*model, &params);
    qs.has_imatrix = has_imatrix;
    std::vector<tensor_metadata> metadata(n_tensors);
    std::vector<size_t> order(n_tensors);
    for (size_t i = 0; i < n_tensors; ++i) {
        metadata[i].name = names[i];
        order[i] = i;
    }
    init_quantize_state_counters(qs, metadata);
    qs.n_ffn_down = qs.n_ffn_gate = qs.n_ffn_up = (int) info.n_layer;
    // the rules count tensors in the loader's order, which is not the file's
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return llama_model_loader::weight_name_comparer()(metadata[a].name, metadata[b].name);
    });
    for (const size_t i : order) {
        ggml_tensor tensor = {};
        tensor.type = GGML_TYPE_F32; // the rules use only names and shapes
        std::copy(ne[i], ne[i] + GGML_MAX_DIMS, tensor.ne);
        ggml_set_name(&tensor, names[i]);
        types[i] = !tensor_allows_quantization(&params, model->arch, &tensor) ? -1 :
            is_named[i] ? (int32_t) default_type :
            (int32_t) llama_tensor_get_type_impl(qs, default_type, &tensor, params.ftype, metadata[i].category);
    }
}

bool ggml_ext_file_rule_types(const ggml_ext_rule_model * model, const ggml_ext_rule_file * file, size_t n_tensors,
                              const char (*names)[GGML_MAX_NAME], const int64_t (*ne)[GGML_MAX_DIMS], const bool * is_named,
                              int32_t * types, bool * is_known, char * error, size_t error_size) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype                = (llama_ftype) file->ftype;
    params.token_embedding_type = file->token_embd < 0 ? GGML_TYPE_COUNT : (ggml_type) file->token_embd;
    params.output_tensor_type   = file->output     < 0 ? GGML_TYPE_COUNT : (ggml_type) file->output;
    try {
        ggml_ext_compute_rule_types(*model, params, file->has_imatrix, n_tensors, names, ne, is_named, types, is_known);
    } catch (const std::exception & e) {
        snprintf(error, error_size, "%s", e.what());
        return false;
    }
    return true;
}

int ggml_ext_rule_fallback(int type, int64_t n_per_row) {
    const ggml_ext_quiet_log quiet;
    try {
        const auto model = ggml_ext_make_model({ "", 0, 0, 0, 0 });
        const llama_model_quantize_params params = llama_model_quantize_default_params();
        quantize_state_impl qs(*model, &params);
        ggml_tensor tensor = {};
        tensor.ne[0] = n_per_row;
        return tensor_type_fallback(qs, &tensor, (ggml_type) type);
    } catch (const std::exception &) {
        return -1;
    }
}
