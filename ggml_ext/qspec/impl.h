// The implementation for upstream's interface, whose base class is known to speculative.cpp alone.
#pragma once

// draft-simple whose draft context is the target's; ggml_ext_qspec_init() has set the precision of all that is no draft
struct common_speculative_impl_qspec : public common_speculative_impl_draft_simple {
    common_speculative_impl_qspec(const common_params_speculative & params, uint32_t n_seq)
        : common_speculative_impl_draft_simple(params, n_seq, COMMON_SPECULATIVE_TYPE_QSPEC) {}

    // what the target has decoded is in the cache already
    bool process(const common_batch & /*batch*/) override {
        return true;
    }

    // Afterwards the cache holds no drafts: verification decodes the same positions with precise activations, in the same cells.
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
