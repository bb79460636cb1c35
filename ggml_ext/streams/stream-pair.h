// The residual streams of the original and of the quantized model at the input of one layer, for all chunks of a text, and what sequential
// quantization (GPTAQ, QEP) needs of that layer: the inputs of its products in both models, and gradients.
#pragma once

#include "backward.h"
#include "layer-copies.h"
#include "../mtp/mtp-layers.h"
#include "mapping.h"
#include "overflow-watcher.h"

#include "llama.h"

#include <nlohmann/json.hpp>

#include <functional>
#include <map>
#include <memory>

namespace ggml_ext {

// Return i, or fail unless it is below n. name: of what there are n.
inline int check_index(const char * name, int i, int n) {
    if (i < 0 || i >= n) {
        fail("there is no " + std::string(name) + " " + std::to_string(i) + " of " + std::to_string(n));
    }
    return i;
}

class stream_pair {
public:
    // mtp: run on the streams behind the last layer. file: holds the streams, unlinked at once; empty: memory.
    stream_pair(llama_context * ctx, mtp_layers & mtp, overflow_watcher & watcher, std::vector<llama_token> tokens, int n_context, int n_chunks,
                const std::string & file);
    ~stream_pair();

    // The model's layers, their groups of products, or the error that prevents cutting it.
    nlohmann::ordered_json describe() const;

    // Allocate memory for the streams, and map the file that arrays are exchanged through. only_original: for collect_inputs() alone.
    void set_exchange(const std::string & path, size_t n_bytes, bool only_original);

    // Let the original model's products use BF16 in place of F16 if the CPU is faster with that.
    void prefer_bf16();

    // Declare that the streams are at the input of layer n. Replacements in earlier layers are dropped.
    void enter_layer(int n);

    // Replace a matrix of the quantized model by the bytes of a file. Kept values that depend on it are dropped; if matrices are replaced in
    // the order of their groups, none do.
    void replace_matrix(const std::string & name, const std::string & type, const std::string & path);

    // Write arrays of a chunk at a group of products to the exchange, each of the original and then of the quantized model: the input, the
    // ids of experts, the residuals of products. advance_original: in the same run, advance the original stream to the layer's output.
    void export_inputs(int group, int chunk, bool advance_original);

    // Write the inputs and the ids of experts of all groups of the layer in the original model to the exchange, those of the output matrix
    // excepted, and advance its stream of a chunk to the layer's output.
    void collect_inputs(int chunk);

    // Advance the quantized stream of a chunk to the layer's output, and the original one unless export_inputs() did so for all chunks.
    // Return the energy of the original and of the difference, without the first token, whose energy is of another order.
    nlohmann::ordered_json advance(int chunk);

    // Allocate memory for the outputs of all layers of n chunks, and their gradients. 0: free it.
    void allocate_gradients(int n);

    // Run a chunk through the original model, and back to the output of the last layer.
    void begin_gradients(int chunk);

    // Write the gradients of the layer's products, except those of experts, to the exchange. The layers are taken from the last to the first.
    void export_gradients(int chunk);

private:
    enum { ORIGINAL, QUANTIZED, NONE = -1 };   // which model runs; NONE: an empty graph, to describe the model
    enum class purpose { layer, full, gradients };

    void                  run_layer(int chunk, int model, int end_group);
    size_t                export_array(const ggml_tensor * t, size_t offset, int index, int n_copies);
    void                  round_matrices();
    void                  transpose_matrices();
    void                  separate_plans();
    int                   find_group(const std::string & weight) const;
    void                  keep_values(int group);
    void                  set_kept_values() const;
    char *                kept_data() const { return kept[model].data() + (size_t) chunk * kept_bytes[model]; }
    void                  compute(int chunk, int model);
    bool                  is_mtp() const { return layer > n_layers; }
    const ggml_ext::layer & current() const { return parts.layers()[is_mtp() ? 0 : layer]; }
    std::vector<ggml_tensor *> layer_outputs() const;
    ggml_tensor *         find_hidden_state() const;
    bool                  has_end() const { return layer < n_layers || (layer == n_layers && mtp.size() > 0); }
    nlohmann::ordered_json describe_layer(int k, int number);
    std::function<void()> edit_graph(ggml_cgraph * graph);
    std::function<void()> cut_layer(ggml_cgraph * graph);
    void                  read_description();
    std::string           find_gradient_error();
    void                  store_stream(int chunk, int model);
    void                  store_selections(const std::vector<ggml_tensor *> & some) const;
    void                  set_selections() const;
    template <class F> void each_selection(const std::vector<ggml_tensor *> & some, const F & f) const;
    char *                stream_data(int model, int chunk) const { return stream[model].data() + (size_t) chunk * chunk_bytes; }
    ggml_bf16_t *         output_data(int k, int chunk) const;
    void                  store_input_gradient(int chunk);
    bool                  is_finite(const float * x) const;
    void                  check_finite(int chunk, int k, const float * x);
    [[noreturn]] void     fail_not_finite(int chunk, const std::string & place);

    llama_context *          ctx;
    mtp_layers &             mtp;
    overflow_watcher &       watcher;
    std::vector<llama_token> tokens;
    std::string              file;
    int                      n_context, n_chunks, n_layers, layer = 0, model = NONE, n_gradients = 0;
    purpose                  run_purpose = purpose::layer;
    const void *             layer_input = nullptr;
    int                      chunk = 0;       // of the run
    int                      start_group = 0; // at whose inputs the run begins; group 0: at the layer's input
    std::pair<int, int>      run_size;        // of its graph
    ggml_context_ptr         unused;          // owns an input that nothing uses
    bool                     is_original_ahead = false; // at the layer's output already, for all chunks
    int64_t                  n_embd = 0;
    size_t                   chunk_bytes = 0;
    mapping                  stream[2], outputs, exchange;
    // By model, the selections that later layers use. Gradients take those of the original model from here too.
    mapping                  selections[2];
    size_t                   selection_bytes = 0; // per chunk
    // By model, the values at the inputs of a group that the next run of a chunk begins with, so that each product is computed once.
    mapping                  kept[2];
    std::vector<int>         kept_group[2];          // by chunk
    size_t                   kept_bytes[2] = {};     // per chunk
    std::vector<ggml_tensor *> start_values, end_values; // of the run: those it begins with, and those to keep
    std::vector<float>       seed; // gradient of the layer's output
    nlohmann::ordered_json   description;
    std::string              error, gradient_error;
    layered_graph            parts; // of the last run
    backward                 back;
    std::function<std::vector<ggml_tensor *>(const ggml_ext::layer &)> select_targets;

    std::map<std::string, const ggml_tensor *>          matrices;
    std::map<std::string, int>                          layer_of; // -1: token embeddings
    std::map<std::string, std::unique_ptr<replacement>> replacements;
    layer_copies                                        rounded;    // of the original model, in BF16
    layer_copies                                        transposed; // of the same, for gradients
    bool                                                rounds_matrices = false;
};

} // namespace ggml_ext
