// Fuzz every kernel of every weight type with random blocks, under address and undefined-behaviour sanitizers.
// Usage: fuzz-blocks SEED ROUNDS. Buffers have the exact size, so that the sanitizer finds reads past the end.
#include "ggml-cpu.h"
#include "ggml-ext-cpu.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

static void fuzz(enum ggml_type type, std::mt19937 & rng) {
    const int  n_blocks = 1 + (int) (rng()%5);
    const int  n        = (int) ggml_blck_size(type)*n_blocks;
    const auto random_bytes = [&](size_t size) {
        std::vector<uint8_t> bytes(size);
        for (auto & b : bytes) { b = (uint8_t) rng(); }
        return bytes;
    };
    const std::vector<uint8_t> row = random_bytes(ggml_row_size(type, n));

    std::vector<float> floats(n);
    ggml_get_type_traits(type)->to_float(row.data(), floats.data(), n);
    ggml_validate_row_data(type, row.data(), row.size());
    std::vector<uint8_t> codes(ggml_blck_size(type));
    ggml_ext_cpu_unpack_block(type, row.data(), codes.data());

    // finite activations of every magnitude, and weights of random bits: NaN, Inf and subnormals too
    for (auto & f : floats) { f = std::ldexp((float) (int32_t) rng()/2147483648.0f, (int) (rng()%60) - 40); }
    if (rng()%4 == 0) { floats[rng()%n] = rng()%2 ? NAN : INFINITY; }
    const auto * cpu = ggml_get_type_traits_cpu(type);
    std::vector<uint8_t> activations(ggml_row_size(cpu->vec_dot_type, n));
    ggml_get_type_traits_cpu(cpu->vec_dot_type)->from_float(floats.data(), activations.data(), n);
    (cpu->vec_dot_type == GGML_TYPE_Q8_KR64 ? ggml_ext_quantize_row_q8_kr64_ref :
     cpu->vec_dot_type == GGML_TYPE_Q8_KR32 ? ggml_ext_quantize_row_q8_kr32_ref : ggml_ext_quantize_row_q8_kr_ref)(
        floats.data(), activations.data(), n);
    float dot;
    cpu->vec_dot(n, &dot, 0, row.data(), 0, activations.data(), 0, 1);

    const std::vector<uint8_t> weights = random_bytes(n*sizeof(float));
    std::vector<uint8_t> encoded(row.size());
    ggml_quantize_chunk(type, (const float *) weights.data(), encoded.data(), 0, 1, n, nullptr);
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s SEED ROUNDS\n", argv[0]);
        return 2;
    }
    ggml_cpu_init();
    std::mt19937 rng((unsigned) atoi(argv[1]));
    const int rounds = atoi(argv[2]);
    for (int i = 0; i < rounds; ++i) {
#define X(NAME, name) fuzz(GGML_TYPE_##NAME, rng);
        GGML_EXT_WEIGHT_TYPES(X)
#undef X
    }
    fprintf(stderr, "%d rounds\n", rounds);
    return 0;
}
