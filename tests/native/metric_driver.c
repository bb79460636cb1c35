// encode/metric.c with a malloc that may fail, for test_metric.py.
#include <stdlib.h>

static int n_allocations_left;

static void * scarce_malloc(size_t n_bytes) {
    return n_allocations_left-- > 0 ? malloc(n_bytes) : NULL;
}

// rename the symbols: those of a loaded libggml-base would take the calls
#define ggml_ext_metric_init scarce_metric_init
#define ggml_ext_metric_free scarce_metric_free
#define metric_new           scarce_metric_new
#define metric_from_importance scarce_metric_of_importance
#define malloc               scarce_malloc
#include "encode/metric.c"

// Return the status of a block-diagonal metric with a limited number of allocations.
int metric_driver_status(int n_allocations, int type, int64_t n_per_row, const float * moments);

int metric_driver_status(int n_allocations, int type, int64_t n_per_row, const float * moments) {
    enum ggml_ext_metric_status status;
    n_allocations_left = n_allocations;
    ggml_ext_metric_free(ggml_ext_metric_init((enum ggml_type) type, n_per_row, moments, false, 0.01f, 32, 1, &status));
    return status;
}
