// The loss whose gradients second moments are taken of: -log p of tokens that are drawn from p, the model's own distribution.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ggml_ext {

// The i-th of a sequence of numbers in [0, 1): splitmix64 (Steele, Lea and Flood 2014), the same everywhere.
inline double uniform(uint64_t i) {
    uint64_t z = (i + 1)*0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30))*0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27))*0x94D049BB133111EBu;
    return (double) ((z ^ (z >> 31)) >> 11)*0x1p-53;
}

// Logits [n_tokens][n_vocab] become the loss's gradient by them: p, less 1 for the token that is drawn. first: the number that the first
// token is drawn with.
inline void differentiate_logits(float * logits, int64_t n_vocab, int n_tokens, uint64_t first) {
    for (int i = 0; i < n_tokens; ++i) {
        float *     x    = logits + i*n_vocab;
        const float most = *std::max_element(x, x + n_vocab);
        double      sum  = 0;
        for (int64_t j = 0; j < n_vocab; ++j) {
            sum += x[j] = std::exp(x[j] - most);
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
