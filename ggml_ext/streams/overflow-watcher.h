// Find the first tensor of a graph whose values are not finite.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"

namespace ggml_ext {

// The original model computes values that are not finite; what() names the first tensor.
struct not_finite : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// -Inf within a graph is not an overflow: masks contain it.
inline bool is_overflow(float x) { return std::isnan(x) || x == INFINITY; }

// Checks the tensors of a graph as they are computed, while it is on. callback() is a ggml_backend_sched_eval_callback.
class overflow_watcher {
public:
    bool        is_on = false;
    std::string first_tensor; // with its sources; empty if there is none

    static bool callback(ggml_tensor * t, bool ask, void * self) {
        overflow_watcher & w = *(overflow_watcher *) self;
        return ask ? w.is_on && w.first_tensor.empty() && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) : w.check(t);
    }

private:
    // Return false to stop the computation.
    bool check(const ggml_tensor * t) {
        std::vector<float> values(ggml_nelements(t));
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
        if (std::any_of(values.begin(), values.end(), is_overflow)) {
            first_tensor = t->name;
            for (int i = 0; i < GGML_MAX_SRC && t->src[i]; ++i) {
                first_tensor += (i ? ", " : " of ") + std::string(t->src[i]->name);
            }
        }
        return first_tensor.empty();
    }
};

} // namespace ggml_ext
