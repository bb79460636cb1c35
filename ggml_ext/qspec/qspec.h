// --spec-type qspec (after the paper QSPEC): one model, one context and one KV cache; tokens are drafted with activations of
// 8 bits and verified with precise ones (llama_set_act_prec), which overwrite what the drafts left in the cache.
#pragma once

#include "common.h"
#include "llama.h"

// Whether the options ask for it.
bool ggml_ext_qspec_enabled(const common_params & params);

// Where the options ask for it, makes ctx, which is empty, the one that drafts too. False, after one line in the log, if the model or
// other options do not allow it.
bool ggml_ext_qspec_init(common_params & params, llama_context * ctx);
