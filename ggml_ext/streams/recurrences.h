// Gradients of operations that ggml cannot differentiate with its own: recurrences over the tokens, convolutions, and the mixing matrices of
// hyper-connections. Each is a custom operation on the CPU, which computes the states again.
//
// Recurrences start with states of zeros: the memory of the context is cleared before each run.
#pragma once

#include <utility>
#include <vector>

#include "ggml.h"

namespace ggml_ext {

// Inputs of a node and their gradients.
using input_gradients = std::vector<std::pair<ggml_tensor *, ggml_tensor *>>;

// Build the gradients of a node, given that of its output, g. Empty: the operation or its form is not supported.
input_gradients differentiate_recurrence(ggml_context * ctx, const ggml_tensor * node, ggml_tensor * g);

} // namespace ggml_ext
