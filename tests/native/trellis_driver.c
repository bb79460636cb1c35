// The search of encode/trellis-search.h for test_trellis_numpy.py: encoders ask for few of the weights that it has to hold.
#include "encode/trellis-search.h"

// States of n_rows rows of n weights under the code with k bits a symbol; before and after: one for each row, or NULL.
void trellis_driver_search(int k, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after, uint16_t * states);

void trellis_driver_search(int k, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after, uint16_t * states) {
#define GGML_EXT_X(NAME, name, K, N, CODE, ...) {K, N, &ggml_ext_##name##_tables, __VA_ARGS__},
    const struct trellis_type types[] = {GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)}, * type = types;
    while (type->k != k) {
        type++;
    }
    struct trellis_work * w = trellis_begin(*type);
    for (int i = 0; i < n_rows; ++i) {
        trellis_search(k, w, x + i*n, n, before ? before[i] : -1, after ? after[i] : -1, states + i*n);
    }
    trellis_end(w);
}
