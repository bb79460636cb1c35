// What tests and benchmarks call of the GEMM (ggml-ext-cpu.h). Included by gemm.cpp in test builds.
#include <chrono>
#include <vector>

using namespace ggml_ext;

int64_t ggml_ext_cpu_gemm_columns(enum ggml_type type) {
#if defined(GGML_EXT_GEMM)
    const gemm_functions * f = find_gemm(type);
    return f ? f->min_columns : INT64_MAX;
#else
    (void) type;
    return INT64_MAX;
#endif
}

double ggml_ext_cpu_peak(void) {
#if defined(GGML_EXT_AVX2)
    auto multiply = multiply_registers;
#if defined(GGML_EXT_AMX)
    multiply = uses_amx() ? multiply_registers_amx : multiply;
#endif
    const gemm_scope scope;
    double best = 0, elapsed = 0;
    while (elapsed < 0.4) {
        const auto    start = std::chrono::steady_clock::now();
        const int64_t n     = multiply(1 << 16);
        const double  time  = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        elapsed += time;
        if (elapsed > 0.2) { // some CPUs lower their clock under this load, others raise it first
            best = std::max(best, n/time);
        }
    }
    return best;
#else
    return 0;
#endif
}

bool ggml_ext_gemm(enum ggml_type type, int64_t n, float * const * s, const void * x, size_t stride, int64_t n_rows, const void * const * y,
                   int n_cols) {
#if defined(GGML_EXT_GEMM)
    struct alignas(64) line { char bytes[64]; };
    const gemm_functions * f = find_gemm(type);
    if (!f) {
        return false;
    }
    const int64_t block = ggml_blck_size(type), n_columns = n_cols + 15; // tiles read 15 more
    const size_t  y_bytes = block == QK_K ? sizeof(block_q8_K) : sizeof(block_q8_kr64), x_bytes = ggml_row_size(type, QK_K);
    std::vector<line>  codes(n_columns*QK_K/64), products(PANEL_ROWS*n_cols*sizeof(float)/64 + 1);
    std::vector<float> d(n_columns), sums(n_columns*MAX_PANEL_SCALES);
    const column_panel columns = {(int8_t *) codes.data(), d.data(), sums.data(), n_columns};
    weight_panel panel;
    const gemm_scope scope;
    for (int64_t row = 0; row < n_rows; row += PANEL_ROWS) {
        const int panel_rows = (int) std::min<int64_t>(PANEL_ROWS, n_rows - row);
        float   * out = (float *) products.data();
        std::fill_n(out, PANEL_ROWS*n_cols, 0.0f);
        for (int64_t b = 0; b*QK_K < n; ++b) {
            for (int c = 0; c < n_cols; ++c) { f->pack_column((const char *) y[c] + b*y_bytes, columns.from(c)); }
            f->pack_rows((const char *) x + row*stride + b*x_bytes, stride, panel_rows, n/block - b*QK_K/block, panel);
            f->multiply(&panel, 1, columns, n_cols, out);
        }
        for (int c = 0; c < n_cols; ++c) { std::copy_n(out + c*PANEL_ROWS, panel_rows, s[c] + row); }
    }
    return true;
#else
    (void) type; (void) n; (void) s; (void) x; (void) stride; (void) n_rows; (void) y; (void) n_cols;
    return false;
#endif
}
