// llama-imatrix --moments: sums over tokens of x x^T for the inputs x of weight matrices.
//
// In the file, beside what llama-imatrix writes (whose own loader passes over names of other endings):
//   imatrix.moments              string    "block": of each 256 columns in turn, the last block perhaps shorter; "full": of all
//   imatrix.moments.block_size   uint32    256
//   imatrix.moments.tensors      strings   weight matrices, and at the same places in
//   imatrix.moments.inputs       strings   the matrix under whose name their moments are: those with the same input share one
//   NAME.in_moments              F32 [n_values, n_mat]   packed lower triangles, row i holds columns 0..i; sums, not means
//   NAME.moment_counts           F32 [1, n_mat]          the tokens that the sums are of; n_mat: 1 or the number of experts
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
    // Checks the options before anything is loaded: format_dat is --output-format dat, text_is_given that
    // tokens will be computed. Like all below it returns false after one line that says what is wrong.
    bool configure(bool format_dat, bool text_is_given);

    // Adds the moments of a file to those here.
    bool load(const std::string & file);

    // Learns from decode(), which evaluates the model's graph on a few tokens, what inputs there are and which matrices share
    // them; says what memory they take, and fails where it is not there.
    bool plan(int n_layers, int n_threads, const std::function<bool()> & decode);

    // The evaluation callback. upstream does what llama-imatrix does without us, and is false for nodes that it does not collect.
    bool collect(const ggml_tensor * node, bool ask, const std::string & weight, const std::function<bool()> & upstream);

    // Writes the file, with the moments unless the run goes on, through FILE.tmp: an interruption leaves the old file or the new.
    void write(gguf_context * file, const std::string & path);

private:
    typedef std::pair<const ggml_tensor *, const ggml_tensor *> source; // activations, and ids of experts or NULL

    struct input {
        int64_t n_values = 0; // of one matrix
        int64_t n_mat    = 0;
        std::vector<float>   sums; // empty until the first token
        std::vector<int64_t> counts;
        source  last = {};

        void allocate();
    };

    bool wanted(const std::string & weight) const;
    bool learn(const ggml_tensor * node, const std::string & weight);
    void add(const ggml_tensor * node, const std::string & weight);
    void add_rows(const ggml_tensor * node, input & to);
    void add_expert(input & to, int64_t n_cols, int64_t expert);
    bool write_file(gguf_context * file, const std::string & path) const;

    std::map<std::string, input>       inputs;   // by the name of their first matrix
    std::map<std::string, std::string> input_of; // matrix -> name in inputs
    std::map<source, std::string>      seen;     // in the evaluation that plan() made
    std::string  kind;     // "block", "full" or empty
    std::string  kind_from; // the option or the file that says so
    std::string  without;  // a file that was loaded and has none
    int          first_layer = 0;
    int          last_layer  = -1; // all
    int          n_layers    = 0;
    bool         has_text    = false;
    bool         collects    = false; // this run adds tokens to the moments
    bool         planning    = false;
    bool         failed      = false; // while planning
    bool         computing   = false; // inside the callback: files that are written are intermediate
    bool         said_intermediate = false, said_without = false, said_unknown = false;

    // the sums of a batch run as a graph on ggml's own threads, which are idle then
    struct backend_free { void operator()(ggml_backend * b) const { ggml_backend_free(b); } };
    struct context_free { void operator()(ggml_context * c) const { ggml_free(c); } };
    std::unique_ptr<ggml_backend, backend_free> cpu;
    std::unique_ptr<ggml_context, context_free> graph_ctx;
    ggml_cgraph *              graph = nullptr;
    ggml_ext_syrk              job   = {};
    std::vector<float>         packed;
    std::vector<const float *> rows;
    std::vector<char>          activations, ids; // copies from a device
};
