// Find products whose columns can be scaled: W diag(s) in the file, and 1/s in what computes their inputs.
#pragma once

#include "ggml.h"
#include "llama.h"

#include <memory>
#include <string>
#include <vector>

namespace ggml_ext {

// Matrices with the same input, and the tensors that make it. If column j of each consumer is multiplied by s(j), the rows of the producers
// (the elements of a vector) are divided by s. Heads may share rows: column j reads row j / (block * repeat) * block + j % block.
struct scale_group {
    std::vector<ggml_tensor *> consumers, producers;
    int64_t                    block = 0, repeat = 1;
};

// Return the groups of a graph. Operations between producers and consumers commute with a scale, and nothing else reads their results.
std::vector<scale_group> find_scale_groups(ggml_cgraph * graph);

// While it exists, the model runs with scaled groups, if its context calls evaluate() for each node. The scales are powers of two, with which
// operations that commute with a scale are exact.
class scaled_run {
  public:
    explicit scaled_run(const std::vector<scale_group> & groups);
    ~scaled_run();

    static bool evaluate(ggml_tensor * node, bool is_before, void * run); // a ggml_backend_sched_eval_callback

  private:
    struct state;
    std::unique_ptr<state> s;
};

} // namespace ggml_ext
