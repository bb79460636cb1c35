// --spec-type qspec (QSPEC paper): one model, one context, one KV cache. Tokens are drafted with 8-bit activations and verified with
// precise ones (llama_set_act_prec), which overwrite the drafts' entries in the cache.
#pragma once

#include "common.h"
#include "llama.h"

bool ggml_ext_qspec_enabled(const common_params & params);

// If the options select qspec, make ctx, which is empty, the draft context too. Log one line and return false if the model or other options
// do not allow it.
bool ggml_ext_qspec_init(common_params & params, llama_context * ctx);
