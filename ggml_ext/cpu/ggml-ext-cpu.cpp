// Entry points of the CPU backend, one instantiation per type.
#include "ggml-ext-cpu.h"
#include "all.h"
#include "ggml-impl.h"

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

template <typename B, typename = void> constexpr bool is_trellis = false;
template <typename B> constexpr bool is_trellis<B, std::void_t<decltype(unpacker<B>::lanes)>> = true;

// Number of columns from which tiles are faster (docs/results/speed.md): with VNNI, dot_columns() multiplies as fast as tiles, and types
// differ by the cost of their scales.
template <typename B> constexpr int64_t tiled_columns(bool with_vnni) {
    if (with_vnni) {
        return 1 + (has_scales<B> ? 24 : group_blocks<B> > 1 ? 120 : 56);
    }
    return 1 + (is_trellis<B> ? 32 : 512);
}

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
const bool HAS_VNNI = true;
#else
const bool HAS_VNNI = false;
#endif

// Test builds can select the limits of the other kind of CPU.
static bool use_vnni_limits() {
#ifdef GGML_EXT_TESTS
    static const bool with_vnni = ggml_ext_env_switch("GGML_EXT_LIMITS_OF_VNNI", HAS_VNNI);
    return with_vnni;
#else
    return HAS_VNNI;
#endif
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

int64_t ggml_ext_cpu_tiled_columns(enum ggml_type type) {
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: return tiled_columns<block_##name>(use_vnni_limits());
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return 0;
    }
}

// A batch of a product's columns and the destinations of their products.
struct column_batch {
    const void * y[2*MAX_COLUMNS];
    float      * s[2*MAX_COLUMNS];
    int          n = 0;

    void add(const void * column, void * products) {
        y[n]   = column;
        s[n++] = (float *) products;
    }
    bool full() const { return n == 2*MAX_COLUMNS; }

    // multiply by rows ir0 to ir0_end of the matrix x
    void multiply(const ggml_tensor * src0, const char * x, int64_t ir0, int64_t ir0_end) {
        for (int c = 0; c < n; ++c) { s[c] += ir0; }
        ggml_ext_dot_columns(src0->type, src0->ne[0], s, x + ir0*src0->nb[1], src0->nb[1], ir0_end - ir0, y, n);
        n = 0;
    }
};

// Return row (i11, i12, i13) of src1, quantized: from the work buffer if src1 is float.
static const char * quantized_row(const ggml_tensor * src1, const void * wdata, size_t row_size, int64_t i11, int64_t i12, int64_t i13) {
    if (src1->type != GGML_TYPE_F32) {
        return (const char *) src1->data + i11*src1->nb[1] + i12*src1->nb[2] + i13*src1->nb[3];
    }
    return (const char *) wdata + (i11 + (i12 + i13*src1->ne[2])*src1->ne[1])*row_size;
}

bool ggml_ext_mul_mat_chunk(const struct ggml_tensor * dst, const void * wdata, size_t row_size, int64_t ir0, int64_t ir0_end,
                            int64_t ir1, int64_t ir1_end) {
    const ggml_tensor * src0 = dst->src[0], * src1 = dst->src[1];
    if (!is_weight_type(src0->type)) {
        return false;
    }
    const int64_t ne1 = dst->ne[1], ne2 = dst->ne[2];
    column_batch columns;
    for (; ir1 < ir1_end; ++ir1) {
        const int64_t i1 = ir1%ne1, i2 = ir1/ne1%ne2, i3 = ir1/ne1/ne2;
        columns.add(quantized_row(src1, wdata, row_size, i1, i2, i3), (char *) dst->data + i1*dst->nb[1] + i2*dst->nb[2] + i3*dst->nb[3]);
        if (columns.full() || i1 == ne1 - 1 || ir1 == ir1_end - 1) { // columns that share a matrix of src0
            columns.multiply(src0, (const char *) src0->data + i2/(ne2/src0->ne[2])*src0->nb[2] + i3/(dst->ne[3]/src0->ne[3])*src0->nb[3],
                             ir0, ir0_end);
        }
    }
    return true;
}

bool ggml_ext_mul_mat_id_chunk(const struct ggml_tensor * dst, const void * wdata, size_t row_size, const char * expert,
                               const int32_t * expert_rows, int64_t ir0, int64_t ir0_end, int64_t ir1, int64_t ir1_end) {
    const ggml_tensor * src0 = dst->src[0], * src1 = dst->src[1];
    if (!is_weight_type(src0->type)) {
        return false;
    }
    column_batch columns;
    for (; ir1 < ir1_end; ++ir1) {
        const int64_t id = expert_rows[2*ir1], i2 = expert_rows[2*ir1 + 1];
        columns.add(quantized_row(src1, wdata, row_size, id%src1->ne[1], i2, 0), (char *) dst->data + id*dst->nb[1] + i2*dst->nb[2]);
        if (columns.full() || ir1 == ir1_end - 1) {
            columns.multiply(src0, expert, ir0, ir0_end);
        }
    }
    return true;
}

const char * ggml_ext_cpu_isa(void) {
    return GGML_EXT_ISA;
}

#ifdef GGML_EXT_TESTS
static std::atomic<int64_t> n_tiles{0};

void ggml_ext_cpu_count_tile(void) {
    n_tiles.fetch_add(1, std::memory_order_relaxed);
}

int64_t ggml_ext_cpu_n_tiles(void) {
    return n_tiles.load(std::memory_order_relaxed);
}
#endif
