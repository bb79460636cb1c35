// The GEMM with AMX tiles of int8. Included by gemm.cpp after x86.h.
//
// 32 rows times 32 columns are four tiles of sums. While tiles are multiplied, the AVX-512 units scale the sums of the previous step.
#pragma once

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ggml_ext {

// Whether the tiles may be used: Linux gives them to processes that ask. GGML_EXT_AMX=0 tells test builds to do without.
static inline bool request_amx() {
#ifdef GGML_EXT_TESTS
    if (!ggml_ext_env_switch("GGML_EXT_AMX", true)) {
        return false;
    }
#endif
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}
static inline bool uses_amx() {
    static const bool granted = request_amx();
    return granted;
}

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) tile_configuration {
    uint8_t  palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t  rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Load this configuration. ggml's own AMX kernels load theirs once per thread, so it must be restored. It is a constant, because GCC's
// intrinsics claim to read 8 of its 64 bytes, and the others might not be written yet.
static inline void configure_tiles(char (&previous)[64]) {
    if (uses_amx()) {
        static constexpr tile_configuration ours;
        _tile_storeconfig(previous);
        _tile_loadconfig(&ours);
    }
}
static inline void restore_tiles(const char (&previous)[64]) {
    if (uses_amx()) {
        _tile_loadconfig(previous);
    }
}

// Columns per step. With four scales, the sums of four times 64 weights wait to be scaled.
template <int S> constexpr int TILE_COLUMNS = S == 1 ? 32 : 16;

// The sums of 32 rows and TILE_COLUMNS columns, and what they are multiplied with.
template <int S, bool OFFSETS> struct tile_sums {
    alignas(64) __m512i  sums[S][TILE_COLUMNS<S>][2];
    const weight_panel * w;
    column_panel         y;
    float              * products;
    int                  n_columns = 0;

    void scale(int first, int end) const {
        if (first == end) {
            return; // nothing has been multiplied yet
        }
        const weight_panel * const weights = w; // copies, because products might overlap this object
        const column_panel   columns = y;
        float * const        out = products;
        for (int c = first; c < end; ++c) {
            for (int half = 0; half < 2; ++half) {
                add_scaled<S, OFFSETS>(*weights, 16*half, &sums[0][c][half], 2*TILE_COLUMNS<S>, columns, c, out + PANEL_ROWS*c + 16*half);
            }
        }
    }
};

static inline void load_weights(const weight_panel & w, int k) {
    _tile_loadd(4, w.codes[16*k][0], 4*PANEL_ROWS);
    _tile_loadd(5, w.codes[16*k][16], 4*PANEL_ROWS);
}

// Sum over 256 weights in four tiles. While they are multiplied, scale the sums of the previous step.
template <bool OFFSETS>
static inline void multiply_tiles(tile_sums<1, OFFSETS> & out, const tile_sums<1, OFFSETS> & before) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 4; ++k) {
        load_weights(*out.w, k);
        _tile_loadd(6, out.y.codes + 64*k, QK_K);
        _tile_dpbsud(0, 6, 4);
        _tile_dpbsud(1, 6, 5);
        if (out.n_columns > 16) {
            _tile_loadd(7, out.y.codes + 16*QK_K + 64*k, QK_K);
            _tile_dpbsud(2, 7, 4);
            _tile_dpbsud(3, 7, 5);
        }
        before.scale(before.n_columns*k/4, before.n_columns*(k + 1)/4);
    }
    _tile_stored(0, &out.sums[0][0][0], 128);
    _tile_stored(1, &out.sums[0][0][1], 128);
    if (out.n_columns > 16) {
        _tile_stored(2, &out.sums[0][16][0], 128);
        _tile_stored(3, &out.sums[0][16][1], 128);
    }
}

// The same with a scale per 64 weights.
template <bool OFFSETS>
static inline void multiply_tiles(tile_sums<4, OFFSETS> & out, const tile_sums<4, OFFSETS> & before) {
    const auto step = [&](int s, auto multiply, auto store) {
        load_weights(*out.w, s);
        _tile_loadd(6, out.y.codes + 64*s, QK_K);
        multiply();
        before.scale(before.n_columns*s/4, before.n_columns*(s + 1)/4);
        store(&out.sums[s][0][0]);
    };
    const auto multiply01 = [] { _tile_zero(0); _tile_zero(1); _tile_dpbsud(0, 6, 4); _tile_dpbsud(1, 6, 5); };
    const auto multiply23 = [] { _tile_zero(2); _tile_zero(3); _tile_dpbsud(2, 6, 4); _tile_dpbsud(3, 6, 5); };
    const auto store01    = [](__m512i * p) { _tile_stored(0, p, 128); _tile_stored(1, p + 1, 128); };
    const auto store23    = [](__m512i * p) { _tile_stored(2, p, 128); _tile_stored(3, p + 1, 128); };
    step(0, multiply01, store01);
    step(1, multiply23, store23);
    step(2, multiply01, store01);
    step(3, multiply23, store23);
}

// As multiply_panels().
template <int S, bool OFFSETS>
static void multiply_panels_amx(const weight_panel * weights, int n_panels, const column_panel & y, int n_columns, float * products) {
    // docs/results/speed.md: between unpacking, larger steps are sometimes slow
    const int n_step = n_columns <= 64 ? 16 : TILE_COLUMNS<S>;
    tile_sums<S, OFFSETS> sums[2];
    int turn = 0;
    for (int first = 0; first < n_columns; first += n_step) {
        for (int i = 0; i < n_panels; ++i, turn ^= 1) {
            tile_sums<S, OFFSETS> & out = sums[turn];
            out.w         = &weights[i];
            out.y         = y.from(first);
            out.products  = products + (i*n_columns + first)*PANEL_ROWS;
            out.n_columns = std::min(n_step, n_columns - first);
            multiply_tiles(out, sums[turn ^ 1]);
        }
    }
    sums[turn ^ 1].scale(0, sums[turn ^ 1].n_columns);
}

#ifdef GGML_EXT_TESTS
// As multiply_registers().
static int64_t multiply_registers_amx(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        _tile_dpbsud(0, 6, 4);
        _tile_dpbsud(1, 6, 5);
        _tile_dpbsud(2, 7, 4);
        _tile_dpbsud(3, 7, 5);
    }
    return n*4*16*16*64;
}
#endif

} // namespace ggml_ext
