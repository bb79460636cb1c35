#include "llama-graph-cut.h"

#include "llama-graph.h"

static ggml_ext_graph_cut & get_cut() {
    static ggml_ext_graph_cut cut;
    return cut;
}

namespace {
struct cut_inputs : llm_graph_input_i {
    explicit cut_inputs(std::function<void()> fill) : fill(std::move(fill)) {}

    void set_input(const llama_ubatch *) override { fill(); }

    std::function<void()> fill;
};
}

void ggml_ext_set_graph_cut(ggml_ext_graph_cut cut) {
    get_cut() = std::move(cut);
}

void ggml_ext_cut_graph(llm_graph_result & result) {
    if (!get_cut()) {
        return;
    }
    // these tensors may be gone, and the context would copy them
    result.t_logits = result.t_embd = result.t_embd_pooled = result.t_h_nextn = nullptr;
    result.add_input(std::make_unique<cut_inputs>(get_cut()(result.get_gf())));
}
