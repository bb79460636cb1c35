// The CPU backend's entry points, one instantiation a type.
#include "ggml-ext-cpu.h"
#include "all.h"

#include <atomic>

using namespace ggml_ext;

#define X(NAME, name)                                                                                              \
    void ggml_ext_vec_dot_##name(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy,         \
                                 size_t by, int nrc) {                                                             \
        assert(n % GGML_EXT_##NAME##_BLOCK_SIZE == 0 && nrc == 1);                                                 \
        GGML_UNUSED(bs); GGML_UNUSED(bx); GGML_UNUSED(by); GGML_UNUSED(nrc);                                       \
        dot_rows<block_##name>(n, s, vx, 0, 1, (const activation_of<block_##name> *) vy);                           \
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

bool ggml_ext_vec_dot_rows(enum ggml_type type, int64_t n, float * s, const void * vx, size_t bx, int64_t n_rows, const void * vy) {
    switch ((int) type) {
#define X(NAME, name)                                                                                              \
        case GGML_TYPE_##NAME:                                                                                     \
            dot_rows<block_##name>((int) n, s, vx, bx, (int) n_rows, (const activation_of<block_##name> *) vy);    \
            return true;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return false;
    }
}

const char * ggml_ext_cpu_isa(void) {
    return GGML_EXT_ISA;
}

static std::atomic<int64_t> n_tiles{0};

void ggml_ext_cpu_count_tile(void) {
    n_tiles.fetch_add(1, std::memory_order_relaxed);
}

int64_t ggml_ext_cpu_n_tiles(void) {
    return n_tiles.load(std::memory_order_relaxed);
}
