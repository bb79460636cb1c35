// The sums of ggml_ext/imatrix/syrk.cpp for ctypes.
#include "imatrix/syrk.cpp"

#include <cmath>
#include <thread>
#include <vector>

extern "C" {

// Add n_rows rows, `stride` floats apart, to totals as llama-imatrix does: in pieces, by n_threads threads.
void ggml_ext_test_add_moments(const float * x, int64_t n_rows, int64_t stride, int64_t n_cols, bool full, int n_threads, float * totals) {
    std::vector<const float *> rows;
    for (int64_t i = 0; i < n_rows; ++i) {
        rows.push_back(x + i * stride);
    }
    std::vector<float> packed(ggml_ext_syrk::packed_size(n_cols), NAN); // NaN: memory outside the rows must not be used
    for (int64_t first = 0; first < n_rows; first += GGML_EXT_SYRK_ROWS) {
        ggml_ext_syrk job = {rows.data() + first, (int) std::min<int64_t>(GGML_EXT_SYRK_ROWS, n_rows - first), n_cols, full,
                             packed.data(), totals, {0}};
        for (int i = 0; i < n_threads; ++i) {
            job.pack(i, n_threads);
        }
        std::vector<std::thread> threads;
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([&job]() { job.add(); });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
    }
}

int64_t ggml_ext_test_n_moments(int64_t n_cols, bool full) {
    return ggml_ext_n_moments(n_cols, full);
}

// sums[i][j] of a[t][i] b[t][j], 16 x 16, by the code for one instruction set. Return false if it is not compiled.
bool ggml_ext_test_multiply(const char * isa, const float * a, const float * b, int n, float * sums) {
    multiply_t f = nullptr;
#if defined(__x86_64__) && __GNUC__ >= 12
    f = !strcmp(isa, "avx512") ? multiply_avx512 : !strcmp(isa, "avx2") ? multiply_avx2 : f;
#endif
    f = !strcmp(isa, "any") ? multiply_any : f;
    if (f) {
        f(a, b, n, sums);
    }
    return f != nullptr;
}

}
