// llama-imatrix --moments: collect Hessians, the sums of x x^T over tokens, for the inputs x of weight matrices.
//
// Added to an imatrix file (llama-imatrix's own loader ignores names with other endings):
//   imatrix.moments              string    "block": block-diagonal, 256 columns each, the last perhaps fewer; "full", of inputs with more
//                                          columns than --moments-columns block-diagonal too, which n_values tells
//   imatrix.moments.block_size   uint32    256
//   imatrix.moments.tensors      strings   weight matrices
//   imatrix.moments.inputs       strings   for each, the matrix that holds its Hessian: matrices with a common input share one
//   NAME.in_moments              F32 [n_values, n_mat]   packed lower triangles, row i has columns 0..i; sums, not means
//   NAME.moment_counts           F32 [1, n_mat]          number of summed tokens; n_mat: 1 or the number of experts
#pragma once

#include "syrk.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "gguf.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class ggml_ext_moments {
public:
    // Check the options. format_dat: --output-format dat; text_is_given: tokens will be computed. Like all functions below, log one
    // line and return false on an error.
    bool configure(bool format_dat, bool text_is_given);

    // Add the Hessians of a file.
    bool load(const std::string & file);

    // Find the inputs, and the matrices that share them, with decode(), which evaluates the graph on a few tokens. Log the memory needed
    // and fail if it is not available.
    bool plan(int n_layers, int n_threads, const std::function<bool()> & decode);

    // The evaluation callback. upstream() does llama-imatrix's own part; it returns false for nodes that it does not collect.
    bool collect(const ggml_tensor * node, bool ask, const std::string & weight, const std::function<bool()> & upstream);

    // Write the file, with Hessians at the end of a run. It goes through FILE.tmp: an interruption leaves the old file or the new one.
    void write(gguf_context * file, const std::string & path);

private:
    typedef std::pair<const ggml_tensor *, const ggml_tensor *> source; // activations, and ids of experts or NULL

    struct input {
        int64_t n_cols   = 0; // set by plan()
        int64_t n_values = 0; // per matrix
        int64_t n_mat    = 0;
        std::vector<float>   sums; // empty until the first token
        std::vector<int64_t> counts;
        source  last = {};         // of the latest batch: the matrices that share the input must have the same

        void allocate();
    };

    bool is_selected(const std::string & weight) const;
    bool is_full(int64_t n_cols) const;
    bool register_input(const ggml_tensor * node, const std::string & weight);
    void add(const ggml_tensor * node, const std::string & weight);
    void add_rows(const ggml_tensor * node, input & dst);
    void add_expert(input & dst, int64_t n_cols, int64_t expert);
    bool write_file(gguf_context * file, const std::string & path) const;

    std::map<std::string, input>       inputs;   // by the name of the first matrix
    std::map<std::string, std::string> input_of; // matrix -> name in inputs
    // inputs found by plan(): name of the first matrix. With the layer, because graphs of several MTP layers use the same memory
    std::map<std::pair<source, int>, std::string> sources;
    std::string  kind;         // "block", "full" or empty
    std::string  kind_from;    // the option or file that sets it
    std::string  file_without; // a loaded file that has none
    int          first_layer = 0;
    int          last_layer  = -1; // all
    int          n_layers    = 0;
    bool         has_text    = false;
    bool         collects    = false; // this run adds tokens
    bool         planning    = false;
    bool         failed      = false; // while planning
    bool         computing   = false; // inside the callback: written files are intermediate
    bool         warned_intermediate = false, warned_unsupported = false, warned_unknown = false;

    // batches are summed by a graph on ggml's own threads, which are idle then
    struct backend_free { void operator()(ggml_backend * b) const { ggml_backend_free(b); } };
    struct context_free { void operator()(ggml_context * c) const { ggml_free(c); } };
    std::unique_ptr<ggml_backend, backend_free> cpu;
    std::unique_ptr<ggml_context, context_free> graph_ctx;
    ggml_cgraph *              graph = nullptr;
    ggml_ext_syrk              job   = {};
    std::vector<float>         packed;  // for the job
    std::vector<const float *> rows;    // inputs to add, of one expert if there are several
    std::vector<char>          activations, ids; // copies from a device
};
