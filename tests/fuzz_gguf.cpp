// Loads GGUF files whose bytes were damaged, under sanitizers: gguf_init_from_file either refuses a file or yields
// tensors whose data are inside it; those of our types are then validated and decoded.
// usage: fuzz-gguf FILE...
#include "ggml.h"
#include "ggml-ext.h"
#include "gguf.h"

#include <cstdio>
#include <vector>

static void load(const char * path, int & n_loaded) {
    ggml_context * ctx = nullptr;
    gguf_context * gguf = gguf_init_from_file(path, {/*.no_alloc =*/ false, /*.ctx =*/ &ctx});
    if (gguf == nullptr) {
        return;
    }
    ++n_loaded;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        ggml_type_name(t->type);
        const auto * traits = ggml_get_type_traits(t->type);
        if (t->data != nullptr && traits->to_float != nullptr && ggml_is_quantized(t->type) && ggml_nelements(t) > 0) {
            if (ggml_validate_row_data(t->type, t->data, ggml_nbytes(t))) {
                std::vector<float> row(t->ne[0]);
                traits->to_float(t->data, row.data(), t->ne[0]);
            }
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
