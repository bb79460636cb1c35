// Run the layers of a model that predict further tokens (MTP, NextN) over a text, as --spec-type draft-mtp runs them over a prompt: each layer
// gets the tokens, and with each token the main model's hidden state at the token before it.
#pragma once

#include "common.h"
#include "llama-cpp.h"

#include <map>
#include <vector>

namespace ggml_ext {

class mtp_layers {
public:
    // main: a context of the model, with the parameters `params`. Without --mtp-layers, and with a model that has no such layers, there are none.
    // Exit with an error if llama.cpp cannot run them.
    mtp_layers(llama_context * main, const common_params & params);

    int size() const { return ctx ? n_layers : 0; }

    // Size of a hidden state.
    int n_embd() const;

    llama_context * context() const { return ctx.get(); }

    // Run layer i on a batch of the main model whose hidden states are [tokens][n_embd()]. All layers run on a batch before the next one. The
    // first token of a text, at position 0, gets zeros. Return false on an error.
    bool run(int i, const common_batch & tokens, const float * hidden);

    // Run all layers on the batch that the main context computed last.
    bool run_all(const common_batch & tokens);

private:
    llama_context *   main;
    llama_context_ptr ctx;
    int               n_layers = 0;
    common_batch      batch;
    std::map<llama_seq_id, std::vector<float>> last; // hidden state at the last token of each sequence
};

} // namespace ggml_ext
