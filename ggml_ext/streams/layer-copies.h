// Copies of a layer's matrices in another form, made once for all chunks.
#pragma once

#include "layers.h"
#include "replacement.h"

#include <map>
#include <memory>

namespace ggml_ext {

class layer_copies {
public:
    // Copy the matrices of layer n that are in the memory of the CPU, unless they are those of the last call. copy: returns a replacement, or
    // null for a matrix that needs none.
    template <class F> void make(int n, const layer & info, const F & copy) {
        if (n == made_for) {
            return;
        }
        copies.clear();
        made_for = n;
        for (const auto & g : info.groups) {
            for (const auto & p : g.products) {
                const ggml_tensor * w = p.node->src[0];
                if (!ggml_is_contiguous(w) || !ggml_backend_buffer_is_host(w->buffer)) {
                    continue;
                }
                if (std::unique_ptr<replacement> made = copy(w)) {
                    copies[w->name] = std::move(made);
                }
            }
        }
    }

    const std::map<std::string, std::unique_ptr<replacement>> & all() const { return copies; }

    // Return the copy of a matrix, or null.
    ggml_tensor * find(const ggml_tensor * w) const {
        const auto it = copies.find(w->name);
        return it == copies.end() ? nullptr : it->second->tensor;
    }

private:
    std::map<std::string, std::unique_ptr<replacement>> copies; // by name
    int                                                 made_for = -1;
};

} // namespace ggml_ext
