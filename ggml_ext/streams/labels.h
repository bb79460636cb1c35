// The loss for gradients: -log p of tokens drawn from p, the model's own distribution. The second moments of its gradients are the Fisher
// information.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ggml_ext {

// Return the i-th number of a sequence in [0, 1): splitmix64 (Steele, Lea and Flood 2014), the same on every machine.
inline double uniform(uint64_t i) {
    uint64_t z = (i + 1)*0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30))*0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27))*0x94D049BB133111EBu;
    return (double) ((z ^ (z >> 31)) >> 11)*0x1p-53;
}

// Replace logits [n_tokens][n_vocab] by the gradient of the loss: p, minus 1 for the drawn token. first: index of the number that draws the
// first token.
inline void differentiate_logits(float * logits, int64_t n_vocab, int n_tokens, uint64_t first) {
    for (int i = 0; i < n_tokens; ++i) {
        float *     x    = logits + i*n_vocab;
        const float largest = *std::max_element(x, x + n_vocab);
        double      sum  = 0;
        for (int64_t j = 0; j < n_vocab; ++j) {
            sum += x[j] = std::exp(x[j] - largest);
        }
        double  rest  = sum*uniform(first + i);
        int64_t drawn = 0;
        while (drawn + 1 < n_vocab && (rest -= x[drawn]) >= 0) {
            ++drawn;
        }
        for (int64_t j = 0; j < n_vocab; ++j) {
            x[j] = (float) (x[j]/sum) - (j == drawn ? 1.0f : 0.0f);
        }
    }
}

} // namespace ggml_ext
