// Entry points of the CPU backend, one instantiation per type.
#include "ggml-ext-cpu.h"
#include "all.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <type_traits>

#if defined(__linux__)
#include <sched.h>
#endif

using namespace ggml_ext;

#define X(NAME, name)                                                                                              \
    void ggml_ext_vec_dot_##name(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy,         \
                                 size_t by, int nrc) {                                                             \
        assert(n % GGML_EXT_##NAME##_BLOCK_SIZE == 0 && nrc == 1);                                                 \
        GGML_UNUSED(bs); GGML_UNUSED(bx); GGML_UNUSED(by); GGML_UNUSED(nrc);                                       \
        dot_columns<block_##name>(n, &s, vx, 0, 1, &vy, 1);                                                        \
    }                                                                                                              \
    void ggml_ext_quantize_row_##name(const float * x, void * y, int64_t n) { quantize_row_##name##_ref(x, y, n); }
GGML_EXT_WEIGHT_TYPES(X)
#undef X

bool ggml_ext_cpu_unpack_block(enum ggml_type type, const void * block, uint8_t * q) {
    uint8_t codes[QK_K];
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: unpack_blocks(load_blocks((const block_##name *) block, 1), codes); break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return false;
    }
    memcpy(q, codes, (size_t) ggml_blck_size(type));
    return true;
}

bool ggml_ext_dot_columns(enum ggml_type type, int64_t n, float * const * s, const void * x, size_t stride, int64_t n_rows,
                          const void * const * y, int n_cols) {
    switch ((int) type) {
#define X(NAME, name)                                                                                              \
        case GGML_TYPE_##NAME: dot_columns<block_##name>((int) n, s, x, stride, (int) n_rows, y, n_cols); return true;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return false;
    }
}

// Dequantize a row, bit-equal to dequantize_row_<type>() of libggml-base.
template <typename B> static void dequantize_row(const void * vx, float * y, int64_t n) {
    constexpr int N = traits<B>::block_size, PER_SCALE = QK_K/n_scales<B>;
    const B * x = (const B *) vx;
    for (int64_t i = 0; i < n; i += QK_K, x += group_blocks<B>, y += QK_K) {
        const int n_values = (int) std::min<int64_t>(n - i, QK_K);
        const unpacker<B> u = load_blocks(x, n_values/N);
        uint8_t codes[QK_K];
        alignas(32) float v[QK_K];
        unpack_blocks(u, codes);
        for (int s = 0; s < n_values/PER_SCALE; ++s) {
            const float d = scale_of(u, s);
            for (int j = PER_SCALE*s; j < PER_SCALE*(s + 1); ++j) { v[j] = d*((float) codes[j] - u.offset); }
        }
        if constexpr (traits<B>::rotated) { ggml_ext_rotate_activations_back(v, n_values, N); }
        memcpy(y, v, n_values*sizeof(y[0]));
    }
}

ggml_to_float_t ggml_ext_to_float(enum ggml_type type) {
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: return dequantize_row<block_##name>;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return ggml_get_type_traits(type)->to_float;
    }
}

static int count_cpus() {
#if defined(__linux__)
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        return CPU_COUNT(&cpus);
    }
#endif
    return (int) std::thread::hardware_concurrency(); // other systems, and more than 1,024 CPUs; 0 if unknown
}

// Counted when the library is loaded, because --cpu-strict later pins the main thread to one CPU.
static const int N_CPUS = count_cpus();

int ggml_ext_limit_threads(int n_threads) {
    static std::atomic<bool> is_reported{false};
    if (N_CPUS == 0 || n_threads <= N_CPUS) {
        return n_threads;
    }
    if (!is_reported.exchange(true)) {
        GGML_LOG_WARN("%s: using %d threads instead of %d, because this process may use %d CPUs\n", __func__, N_CPUS, n_threads, N_CPUS);
    }
    return N_CPUS;
}

bool ggml_ext_env_switch(const char * name, bool fallback) {
    const char * text = getenv(name);
    if (!text) {
        return fallback;
    }
    char * end;
    const long value = strtol(text, &end, 10);
    if (end == text || *end) {
        GGML_LOG_WARN("%s: got \"%s\", needs 0 or 1: taken as %d\n", name, text, fallback);
        return fallback;
    }
    return value != 0;
}

const char * ggml_ext_cpu_isa(void) {
    return GGML_EXT_ISA;
}
