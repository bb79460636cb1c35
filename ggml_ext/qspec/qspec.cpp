#include "qspec/qspec.h"

#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <string>

bool ggml_ext_qspec_enabled(const common_params & params) {
    const auto & types = params.speculative.types;
    return std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_QSPEC) != types.end();
}

// Types that draft with a model or context of their own.
static bool needs_draft_context(common_speculative_type type) {
    switch (type) {
        case COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE:
        case COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3:
        case COMMON_SPECULATIVE_TYPE_DRAFT_MTP:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK:
            return true;
        default:
            return false;
    }
}

// Return why qspec cannot run, or nothing.
static std::string find_refusal(const common_params & params, llama_context * ctx) {
    const auto * model = llama_get_model(ctx);
    const auto & spec  = params.speculative;
    const int64_t n_parallel = params.n_parallel, n_batch = llama_n_batch(ctx);

    const auto other = std::find_if(spec.types.begin(), spec.types.end(), needs_draft_context);
    if (spec.has_dft()) {
        return string_format("draft model '%s' given; the model drafts for itself: leave --spec-draft-model out",
                             spec.draft.mparams.get_name().c_str());
    }
    if (other != spec.types.end()) {
        return string_format("'%s' drafts with a context of its own; take one of the two, or an ngram type with qspec",
                             common_speculative_type_to_str(*other).c_str());
    }
    if (spec.draft.n_max < 1) {
        return "--spec-draft-n-max 0 drafts no tokens; it needs 1 or more";
    }
    if (n_parallel*(spec.draft.n_max + int64_t(1)) > n_batch) {
        return string_format("--spec-draft-n-max %d: %lld slots verify up to %lld tokens at once, a batch holds %lld; "
                             "lower it or --parallel, or raise --batch-size and --ctx-size", spec.draft.n_max, (long long) n_parallel,
                             (long long) (n_parallel*(spec.draft.n_max + int64_t(1))), (long long) n_batch);
    }
    if (params.sampling.backend_sampling) {
        return "--backend-sampling would sample from drafts too; leave it out";
    }
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return "the model is recurrent, and its state cannot take drafts back; use an ngram type";
    }
    if (llama_model_n_swa(model) > 0 && !params.swa_full) {
        return string_format("the model has a sliding window of %d tokens, in whose cache drafts overwrite older ones; add --swa-full",
                             llama_model_n_swa(model));
    }
    if (common_context_can_seq_rm(ctx) != COMMON_CONTEXT_SEQ_RM_TYPE_PART) {
        return "the memory of this model cannot take drafts back; use an ngram type";
    }
    return "";
}

bool ggml_ext_qspec_init(common_params & params, llama_context * ctx) {
    if (!ggml_ext_qspec_enabled(params)) {
        return true;
    }
    auto refusal = find_refusal(params, ctx);
    if (refusal.empty()) {
        llama_set_act_prec(ctx, LLAMA_ACT_PREC_F16); // for prompts and verification, regardless of --act-prec
        if (llama_get_act_prec(ctx) != LLAMA_ACT_PREC_F16) {
            refusal = "it needs --act-prec f16, which was refused above";
        }
    }
    if (!refusal.empty()) {
        LOG_ERR("error: --spec-type qspec: %s\n", refusal.c_str());
        return false;
    }
    params.speculative.draft.ctx_tgt = ctx;
    params.speculative.draft.ctx_dft = ctx;
    return true;
}
