// The GEMM with NEON's dot product instructions, or with i8mm (products of 2x8 and 8x2 bytes) if enabled. Included by gemm.cpp.
#pragma once

namespace ggml_ext {

// Codes are below 128.
static inline int8x16_t load_codes(const uint8_t * p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int TILE_ROWS        = 16;
constexpr int COLUMNS_PER_PASS = 4; // the sums of 16 rows fill 16 registers; those of six columns would be spilled
static_assert(PANEL_ROWS == TILE_ROWS, "the codes of rows 0-7 and 8-15 are adjacent");

// The low, or the high, 64 bits of two vectors.
static inline int8x16_t low_lanes(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
static inline int8x16_t high_lanes(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
static inline int32x4_t low_lanes(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
static inline int32x4_t high_lanes(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// Without this, GCC 12 copies the sums from register to register.
static inline int32x4_t keep(int32x4_t v) {
    __asm__("" : "+w"(v));
    return v;
}

// Eight codes of a row are adjacent: dwords t and t + 1 of rows 0-7 go to at(t), those of rows 8-15 to at(t + 1).
template <typename F> static inline void transpose16(const uint8_t (&codes)[16][64], F at) {
    for (int t = 0; t < 16; t += 4) {
        for (int half = 0; half < 2; ++half) {
            uint8_t * const low = at(t + half), * const high = at(t + 2 + half);
            for (int r = 0; r < 8; r += 2) {
                const int8x16_t q0 = load_codes(codes[8*half + r] + 4*t), q1 = load_codes(codes[8*half + r + 1] + 4*t);
                vst1q_s8((int8_t *) low + 8*r,  low_lanes(q0, q1));
                vst1q_s8((int8_t *) high + 8*r, high_lanes(q0, q1));
            }
        }
    }
}

// The sums of the codes under scale s, for 16 rows. Two rows and two columns have an accumulator.
template <int S, int C>
static inline void multiply_codes(const weight_panel & w, int, const int8_t * codes, int s, int32x4_t (&sums)[C][4]) {
    constexpr int PAIRS = (C + 1)/2; // the last column may be its own partner
    int32x4_t acc[PAIRS][8];
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p) {
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) { acc[p][r] = vdupq_n_s32(0); }
    }
    codes += QK_K/S*s;
    for (int k = QK_K/4/S*s; k < QK_K/4/S*(s + 1); k += 4, codes += 16) {
        int8x16_t y[2][PAIRS]; // eight activations of two columns
#pragma GCC unroll 4
        for (int p = 0; p < PAIRS; ++p) {
            const int8x16_t y0 = vld1q_s8(codes + QK_K*2*p), y1 = vld1q_s8(codes + QK_K*std::min(2*p + 1, C - 1));
            y[0][p] = low_lanes(y0, y1);
            y[1][p] = high_lanes(y0, y1);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 8
            for (int r = 0; r < 8; ++r) {
                const int8x16_t q = load_codes(w.codes[k + 2*h][0] + 16*r);
#pragma GCC unroll 4
                for (int p = 0; p < PAIRS; ++p) { acc[p][r] = keep(vmmlaq_s32(acc[p][r], y[h][p], q)); }
            }
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            sums[c][r] = c%2 ? high_lanes(acc[c/2][2*r], acc[c/2][2*r + 1]) : low_lanes(acc[c/2][2*r], acc[c/2][2*r + 1]);
        }
    }
}
#else
constexpr int TILE_ROWS        = 8;
constexpr int COLUMNS_PER_PASS = 8; // the sums of eight rows fill 16 registers, and the columns' activations eight

// Write dwords t to t + 3 of rows r to r + 3.
template <typename F> static inline void transpose4(const uint8_t (&codes)[16][64], int r, int t, F at) {
    const auto load  = [&](int i) { return vreinterpretq_s32_u8(vld1q_u8(codes[r + i] + 4*t)); };
    const auto store = [&](int i, int64x2_t v) { vst1q_s64((int64_t *) (at(t + i) + 4*r), v); };
    const int32x4_t r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
    const int64x2_t even01 = vreinterpretq_s64_s32(vtrn1q_s32(r0, r1)), odd01 = vreinterpretq_s64_s32(vtrn2q_s32(r0, r1));
    const int64x2_t even23 = vreinterpretq_s64_s32(vtrn1q_s32(r2, r3)), odd23 = vreinterpretq_s64_s32(vtrn2q_s32(r2, r3));
    store(0, vtrn1q_s64(even01, even23));
    store(1, vtrn1q_s64(odd01, odd23));
    store(2, vtrn2q_s64(even01, even23));
    store(3, vtrn2q_s64(odd01, odd23));
}

template <typename F> static inline void transpose16(const uint8_t (&codes)[16][64], F at) {
    for (int t = 0; t < 16; t += 4) {
        for (int r = 0; r < 16; r += 4) { transpose4(codes, r, t, at); }
    }
}

// Add the products of four codes of eight rows with dword T of each column's activations.
template <int T, int C> static inline void add_dot4(int32x4_t (&acc)[C][2], const uint8_t * q, const int8x16_t (&y)[C]) {
    const int8x16_t q0 = load_codes(q), q1 = load_codes(q + 16);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        acc[c][0] = vdotq_laneq_s32(acc[c][0], q0, y[c], T);
        acc[c][1] = vdotq_laneq_s32(acc[c][1], q1, y[c], T);
    }
}

// The sums of the codes under scale s, for eight rows from r on.
template <int S, int C>
static inline void multiply_codes(const weight_panel & w, int r, const int8_t * codes, int s, int32x4_t (&sums)[C][2]) {
    int32x4_t acc[C][2];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) { acc[c][0] = acc[c][1] = vdupq_n_s32(0); }
    codes += QK_K/S*s;
#pragma GCC unroll 1 // Clang would unroll 64 weights and spill
    for (int k = QK_K/4/S*s; k < QK_K/4/S*(s + 1); k += 4, codes += 16) {
        int8x16_t y[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) { y[c] = vld1q_s8(codes + QK_K*c); }
        add_dot4<0>(acc, w.codes[k][r],     y);
        add_dot4<1>(acc, w.codes[k + 1][r], y);
        add_dot4<2>(acc, w.codes[k + 2][r], y);
        add_dot4<3>(acc, w.codes[k + 3][r], y);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        sums[c][0] = acc[c][0];
        sums[c][1] = acc[c][1];
    }
}
#endif

// Add the scaled products of the rows from r on: `sums` are those of the codes under scale s.
template <bool OFFSETS, int C>
static inline void add_scaled(const weight_panel & w, int r, int s, const int32x4_t (&sums)[C][TILE_ROWS/4], const column_panel & y,
                              float * products) {
    constexpr int N = TILE_ROWS/4;
    float32x4_t d[N], offset[N]; // loaded once, because products might overlap the panel
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        d[i]      = vld1q_f32(w.d[s] + r + 4*i);
        offset[i] = OFFSETS ? vld1q_f32(w.offset + r + 4*i) : vdupq_n_f32(0);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        const float32x4_t column_d = vld1q_dup_f32(y.d + c), column_sum = vld1q_dup_f32(y.sums + s*y.stride + c);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            float * const     out = products + PANEL_ROWS*c + r + 4*i;
            const float32x4_t sum = vcvtq_f32_s32(sums[c][i]);
            const float32x4_t x = OFFSETS ? vfmsq_f32(vmulq_f32(sum, column_d), offset[i], column_sum)
                                          : vfmaq_f32(vnegq_f32(column_sum), sum, column_d);
            vst1q_f32(out, vfmaq_f32(vld1q_f32(out), x, d[i]));
        }
    }
}

template <int S, bool OFFSETS, int C>
static void multiply_columns(const weight_panel & w, const column_panel & y, float * products) {
    for (int r = 0; r < PANEL_ROWS; r += TILE_ROWS) {
        for (int s = 0; s < S; ++s) {
            int32x4_t sums[C][TILE_ROWS/4];
            multiply_codes<S>(w, r, y.codes, s, sums);
            add_scaled<OFFSETS>(w, r, s, sums, y, products);
        }
    }
}

} // namespace ggml_ext
