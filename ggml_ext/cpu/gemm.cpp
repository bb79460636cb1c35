// The GEMM's functions for each type. gemm/ has for an instruction set:
//
//   transpose16(codes, at)     write dword t of 16 rows of 64 codes to the 64 bytes at(t), in the order of multiply_columns()
//   COLUMNS_PER_PASS           columns for which the sums stay in registers
//   multiply_columns<S, OFFSETS, C>(weights, y, products)    C columns with one panel; S scales per 256 weights
//   multiply_panels_amx<S, OFFSETS>(...)                     as multiply_panels(), if uses_amx()
#include "gemm.h"
#include "ggml-ext-cpu.h"
#include "all.h"

#if defined(GGML_EXT_GEMM)
#if defined(GGML_EXT_AVX2)
#include "gemm/x86.h"
#if defined(GGML_EXT_AMX)
#include "gemm/amx.h"
#endif
#else
#include "gemm/neon.h"
#endif

namespace ggml_ext {

// Whether each block has its own offset.
template <typename B> constexpr bool has_offsets = std::is_member_object_pointer_v<decltype(&unpacker<B>::offset)>;

// Position of dword t of the codes of groups G and G + 4 in a panel. Codes under one scale are contiguous.
template <typename B> constexpr int panel_dword(int G, int t) {
    // four blocks have two dwords each in a group
    return group_blocks<B> == 1 ? 16*G + t : 16*(t%8/2) + 4*G + 2*(t/8) + t%2;
}

template <int S, bool OFFSETS, int... C>
static inline void multiply_columns(const weight_panel & w, const column_panel & y, int n_columns, float * products,
                                    std::integer_sequence<int, C...>) {
    (void) ((n_columns == C + 1 && (multiply_columns<S, OFFSETS, C + 1>(w, y, products), true)) || ...);
}

template <int S, bool OFFSETS>
static void multiply_panels(const weight_panel * weights, int n_panels, const column_panel & y, int n_columns, float * products) {
    const int n_passes = (n_columns + COLUMNS_PER_PASS - 1)/COLUMNS_PER_PASS;
    for (int pass = 0; pass < n_passes; ++pass) {
        const int first = n_columns*pass/n_passes, end = n_columns*(pass + 1)/n_passes;
        for (int i = 0; i < n_panels; ++i) {
            multiply_columns<S, OFFSETS>(weights[i], y.from(first), end - first, products + (i*n_columns + first)*PANEL_ROWS,
                                         std::make_integer_sequence<int, COLUMNS_PER_PASS>());
        }
    }
}

// Call f(G, codes) with 64 codes for G = 0 .. 3: groups G and G + 4, or with four scales per block the weights under scale G.
template <typename B, typename F> static inline void each_64(const unpacker<B> & u, F f) {
    if constexpr (has_scales<B>) {
        f(0, join(u.template group<0>(), u.template group<1>()));
        f(1, join(u.template group<2>(), u.template group<3>()));
        f(2, join(u.template group<4>(), u.template group<5>()));
        f(3, join(u.template group<6>(), u.template group<7>()));
    } else {
        each_groups(u, f);
    }
}

template <typename B> static void pack_rows(const char * rows, size_t stride, int n_rows, int64_t n_blocks, weight_panel & panel) {
    alignas(64) uint8_t codes[4][16][64];
    for (int r0 = 0; r0 < PANEL_ROWS; r0 += 16) {
        for (int r = 0; r < 16; ++r) {
            const B * row = (const B *) (rows + std::min(r0 + r, n_rows - 1)*stride);
            prefetch((const char *) (row + group_blocks<B>), group_blocks<B>*sizeof(B));
            const unpacker<B> u = load_blocks(row, n_blocks);
            each_64(u, [&](int G, u8x64 q) {
                store(codes[G][r], low_half(q));
                store(codes[G][r] + 32, high_half(q));
            });
            for (int s = 0; s < n_scales<B>; ++s) { panel.d[s][r0 + r] = scale_of(u, s); }
            if constexpr (has_offsets<B>) { panel.offset[r0 + r] = u.offset; }
        }
        for (int G = 0; G < 4; ++G) {
            transpose16(codes[G], [&](int t) { return panel.codes[panel_dword<B>(G, t)][r0]; });
        }
    }
}

// The factor of a column's sums.
template <typename B> static inline float sum_factor() {
    if constexpr (has_offsets<B>) {
        return 1.0f;
    } else {
        return unpacker<B>::offset;
    }
}

template <typename B> static void pack_column(const block_q8_K & y, const column_panel & out) {
    constexpr int S = n_scales<B>;
    order_column<B>(y, out.codes);
    *out.d = y.d;
    for (int s = 0; s < S; ++s) {
        int sum = 0;
        for (int i = 0; i < 16/S; ++i) { sum += y.bsums[16/S*s + i]; }
        out.sums[s*out.stride] = y.d*(sum_factor<B>()*(float) sum);
    }
}
template <typename B> static void pack_column(const block_q8_kr64 & y, const column_panel & out) {
    for (int G = 0; G < 4; ++G) {
        for (int t = 0; t < 16; t += 2) { memcpy(out.codes + 4*panel_dword<B>(G, t), y.qs + 64*G + 4*t, 8); }
    }
    *out.d = y.d[0];
    for (int s = 0; s < GGML_EXT_GROUP_BLOCKS; ++s) { out.sums[s*out.stride] = y.d[s]*(sum_factor<B>()*y.sum[s]); }
}

#if defined(GGML_EXT_AVX2) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr bool HAS_DOT4 = false; // three instructions instead of one
#else
constexpr bool HAS_DOT4 = true;
#endif

template <typename B, typename = void> constexpr bool is_trellis = false;
template <typename B> constexpr bool is_trellis<B, std::void_t<decltype(unpacker<B>::lanes)>> = true;

// docs/results/speed.md. Trellis types gain most from unpacking once for all columns.
template <typename B> static constexpr int64_t gemm_columns() {
    return HAS_DOT4 ? (group_blocks<B> > 1 ? 10 : has_scales<B> ? 8 : 9) : is_trellis<B> ? 11 : has_scales<B> ? 80 : 29;
}

template <typename B> static gemm_functions make_functions() {
    constexpr int S = n_scales<B>;
    gemm_functions f = {S, gemm_columns<B>(), pack_rows<B>,
                        [](const void * y, const column_panel & out) { pack_column<B>(*(const activation_block<B> *) y, out); },
                        multiply_panels<S, has_offsets<B>>};
#if defined(GGML_EXT_AMX)
    if (uses_amx()) {
        f.multiply = multiply_panels_amx<S, has_offsets<B>>;
    }
#endif
    return f;
}

// NULL for blocks of 32: few rows need them, and a panel has no room for their eight scales.
template <typename B> static const gemm_functions * functions_of() {
    if constexpr (n_scales<B> > MAX_PANEL_SCALES) {
        return nullptr;
    } else {
        static const gemm_functions f = make_functions<B>();
        return &f;
    }
}

const gemm_functions * find_gemm(ggml_type type) {
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: return functions_of<block_##name>();
        GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return nullptr;
    }
}

gemm_scope::gemm_scope() {
#if defined(GGML_EXT_AMX)
    configure_tiles(previous);
#endif
}

gemm_scope::~gemm_scope() {
#if defined(GGML_EXT_AMX)
    restore_tiles(previous);
#endif
}

} // namespace ggml_ext
#endif

#ifdef GGML_EXT_TESTS
#include "gemm_tests.h"
#endif
