#include "mtp-layers.h"

#include "imatrix/moments-options.h"

#include "llama-ext.h"
#include "log.h"

namespace ggml_ext {

mtp_layers::mtp_layers(llama_context * main, const common_params & params) : main(main) {
    llama_model * model = const_cast<llama_model *>(llama_get_model(main)); // the model that the caller loaded
    n_layers = llama_model_n_layer_nextn(model);
    if (!ggml_ext_get_moments_options().mtp_layers || n_layers == 0) {
        return;
    }
    llama_context_params mtp_params = common_context_params_to_llama(params);
    mtp_params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    mtp_params.n_ctx    = llama_n_ctx(main);
    ctx.reset(llama_init_from_model(model, mtp_params));
    if (!ctx) {
        LOG_ERR("error: --mtp-layers: llama.cpp cannot run the MTP layers of this model; remove the option\n");
        exit(1);
    }
    batch = common_batch(ctx.get());
    llama_set_embeddings_nextn(main, true, /*masked*/ false);
}

int mtp_layers::n_embd() const { return llama_model_n_embd_out(llama_get_model(main)); }

bool mtp_layers::run(int i, const common_batch & tokens, const float * hidden) {
    const size_t             n = n_embd();
    const std::vector<float> zeros(n);
    std::map<llama_seq_id, const float *> before;
    batch.clear();
    for (int k = 0; k < tokens.size(); ++k) {
        const auto & token = tokens.tokens[k];
        if (!before.count(token.seq_id)) {
            // keep the KV cells of earlier batches; drop those that another layer wrote at these positions
            llama_memory_seq_rm(llama_get_memory(ctx.get()), token.seq_id, token.pos[0], -1);
            before[token.seq_id] = token.pos[0] == 0 ? zeros.data() : last.at(token.seq_id).data();
        }
        const int index = batch.add(token.id, token.pos[0], token.seq_id, true); // some graphs drop tokens that have no output
        batch.set_embd(index, { before[token.seq_id], 1, n });
        before[token.seq_id] = hidden + k * n;
    }
    llama_set_nextn_layer_offset(ctx.get(), i);
    const bool has_run = llama_process(ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get()) == 0;
    for (const auto & [sequence, state] : before) {
        if (i == n_layers - 1) {
            last[sequence].assign(state, state + n);
        }
    }
    return has_run;
}

bool mtp_layers::run_all(const common_batch & tokens) {
    for (int i = 0; i < size(); ++i) {
        if (!run(i, tokens, llama_get_embeddings_nextn(main))) {
            return false;
        }
    }
    return true;
}

} // namespace ggml_ext
