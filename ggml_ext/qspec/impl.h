// The qspec implementation of upstream's speculation interface. Its base class exists in speculative.cpp only, which includes this file.
#pragma once

// draft-simple with the target's context as draft context. ggml_ext_qspec_init() sets the precision for everything except drafts.
struct common_speculative_impl_qspec : public common_speculative_impl_draft_simple {
    common_speculative_impl_qspec(const common_params_speculative & params, uint32_t n_seq)
        : common_speculative_impl_draft_simple(params, n_seq, COMMON_SPECULATIVE_TYPE_QSPEC) {}

    // the target has written its batch to the shared cache already
    bool process(const common_batch & /*batch*/) override {
        return true;
    }

    // Remove the drafts from the cache: verification decodes the same positions with precise activations, in the same cells.
    void draft(common_speculative_draft_params_vec & dparams) override {
        auto * ctx = params.ctx_tgt;

        llama_set_act_prec(ctx, LLAMA_ACT_PREC_Q8);
        common_speculative_impl_draft_simple::draft(dparams);
        llama_set_act_prec(ctx, LLAMA_ACT_PREC_F16);

        for (llama_seq_id seq_id = 0; seq_id < (llama_seq_id) n_seq; ++seq_id) {
            if (dparams[seq_id].drafting && !llama_memory_seq_rm(llama_get_memory(ctx), seq_id, dparams[seq_id].pos0, -1)) {
                GGML_ABORT("failed to remove the drafts of sequence %d\n", seq_id);
            }
        }
    }
};
