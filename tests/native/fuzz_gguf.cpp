// Load damaged GGUF files under sanitizers as llama.cpp does: the header, then the data of tensors within the file. Quantized tensors are
// validated and decoded.
// Usage: fuzz-gguf FILE...
#include "ggml.h"
#include "gguf.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

static void load(const char * path, int & n_loaded) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    ggml_context * ctx = nullptr;
    gguf_context * gguf = gguf_init_from_file(path, {/*.no_alloc =*/ true, /*.ctx =*/ &ctx});
    if (gguf == nullptr) {
        return;
    }
    ++n_loaded;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        const ggml_tensor * t = ggml_get_tensor(ctx, gguf_get_tensor_name(gguf, i));
        const size_t offset = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i);
        const auto * traits = ggml_get_type_traits(t->type);
        if (offset > bytes.size() || ggml_nbytes(t) > bytes.size() - offset || !ggml_is_quantized(t->type) || ggml_nelements(t) == 0) {
            continue;
        }
        const std::vector<char> data(bytes.begin() + offset, bytes.begin() + offset + ggml_nbytes(t)); // exact size, so that overruns are found
        if (ggml_validate_row_data(t->type, data.data(), data.size()) && traits->to_float != nullptr) {
            std::vector<float> row(t->ne[0]);
            traits->to_float(data.data(), row.data(), t->ne[0]);
        }
    }
    gguf_free(gguf);
    ggml_free(ctx);
}

int main(int argc, char ** argv) {
    int n_loaded = 0;
    for (int i = 1; i < argc; ++i) {
        load(argv[i], n_loaded);
    }
    printf("%d files, %d loaded\n", argc - 1, n_loaded);
    return 0;
}
