// The search of encode/trellis-search.h for test_trellis_numpy.py: encoders ask for few of the weights that it has to hold.
#include "encode/trellis-search.h"

// States of n_rows rows of n weights under the code of a type, n/V per row; before and after: one for each row, or NULL.
void trellis_driver_search(const char * type_name, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after,
                           uint16_t * states);

void trellis_driver_search(const char * type_name, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after,
                           uint16_t * states) {
#define GGML_EXT_X(NAME, name, K, V, N, CODE, ...) {K, V, N, &ggml_ext_##name##_tables, __VA_ARGS__},
    static const struct trellis_type types[] = {GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)};
#undef GGML_EXT_X
#define GGML_EXT_X(NAME, name, ...) #name,
    static const char * const names[] = {GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)};
    int i = 0;
    while (strcmp(names[i], type_name) != 0) {
        i++;
    }
    const struct trellis_type type = types[i];
    struct trellis_work * w = trellis_begin(type);
    for (int r = 0; r < n_rows; ++r) {
        trellis_search(type, w, x + r*n, n, before ? before[r] : -1, after ? after[r] : -1, states + r*n/type.v);
    }
    trellis_end(w);
}
