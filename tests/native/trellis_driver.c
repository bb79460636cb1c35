// The search of encode/trellis-search.h for test_trellis_numpy.py: encoders ask for few of the weights that it has to hold.
#include "encode/trellis-search.h"

#include "types/itq2_t.h"
#include "types/itq3_t.h"
#include "types/itq4_t.h"

// States of n_rows rows of n weights; before and after: one for each row, or NULL.
void trellis_driver_search(int k, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after, uint16_t * states);

void trellis_driver_search(int k, const float * x, int n_rows, int n, const int32_t * before, const int32_t * after, uint16_t * states) {
    const struct trellis_type t3 = {3, QK_K, &ggml_ext_itq3_t_tables, GGML_EXT_ITQ3_T_TRELLIS_OFFSET, 0.0f};
    const struct trellis_type t2 = {2, QK_K, &ggml_ext_itq2_t_tables, GGML_EXT_ITQ2_T_TRELLIS_OFFSET, 0.0f};
    const struct trellis_type t4 = {4, QK_K, &ggml_ext_itq4_t_tables, GGML_EXT_ITQ4_T_TRELLIS_OFFSET, 0.0f};
    struct trellis_work * w = trellis_begin(k == 4 ? t4 : k == 3 ? t3 : t2);
    for (int i = 0; i < n_rows; ++i) {
        trellis_search(k, w, x + i*n, n, before ? before[i] : -1, after ? after[i] : -1, states + i*n);
    }
    trellis_end(w);
}
