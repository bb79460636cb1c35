// Rotation fused into the 8-bit quantisation of an activation row: the one pass over the activations that every
// rotated weight type needs. Bit-equal to ggml_ext_quantize_row_q8_kr_ref: the same butterflies in the same order.
#include "ggml-ext-cpu.h"
#include "../ggml-ext-rotation.h"
#include "simd.h"

using namespace ggml_ext;

// One stage across N registers, r[i] paired with r[i + stride].
template <int N> static inline void butterflies(f32x8 (&r)[N], int stride) {
    for (int i = 0; i < N; i += 2*stride) {
        for (int j = i; j < i + stride; ++j) {
            const f32x8 u = r[j], v = r[j + stride];
            r[j]          = u + v;
            r[j + stride] = u - v;
        }
    }
}

// The signs as factors.
struct sign_factors {
    alignas(32) float of[QK_K];
    constexpr sign_factors() : of() {
        for (int j = 0; j < QK_K; ++j) {
            of[j] = ggml_ext_signs[j/32] >> j%32 & 1 ? -1.0f : 1.0f;
        }
    }
};
static constexpr sign_factors signs;

// v = R x in two passes, 8 registers (strides 1 to 32) and 4 registers (64 and 128), so that nothing spills.
// Returns the largest magnitude, Inf or NaN if there is one.
static inline float rotate(const float * x, float * v) {
    for (int i = 0; i < QK_K; i += 64) {
        f32x8 r[8];
        for (int k = 0; k < 8; ++k) {
            r[k] = butterfly<4>(butterfly<2>(butterfly<1>(load(x + i + 8*k)*load(signs.of + i + 8*k))));
        }
        butterflies(r, 1);
        butterflies(r, 2);
        butterflies(r, 4);
        for (int k = 0; k < 8; ++k) {
            store(v + i + 8*k, r[k]);
        }
    }
    magnitude_max amax;
    for (int i = 0; i < 64; i += 8) {
        f32x8 r[4];
        for (int k = 0; k < 4; ++k) {
            r[k] = load(v + i + 64*k);
        }
        butterflies(r, 1);
        butterflies(r, 2);
        for (int k = 0; k < 4; ++k) {
            r[k] = r[k]*(1.0f/16);
            amax.add(r[k]);
            store(v + i + 64*k, r[k]);
        }
    }
    return amax.total();
}

void ggml_ext_quantize_row_q8_kr(const float * x, void * vy, int64_t n) {
    assert(n % QK_K == 0);
    block_q8_K * y = (block_q8_K *) vy;
    for (int64_t ib = 0; ib < n/QK_K; ++ib, x += QK_K) {
        alignas(32) float v[QK_K];
        float inv_d;
        if (!ggml_ext_begin_q8_kr(&y[ib], rotate(x, v), &inv_d)) {
            continue;
        }
        for (int g = 0; g < QK_K/32; ++g) {
            f32x8 scaled[4];
            for (int k = 0; k < 4; ++k) {
                scaled[k] = load(v + 32*g + 8*k)*inv_d;
            }
            const u8x32 q = round_to_i8(scaled);
            store((uint8_t *) y[ib].qs + 32*g, q);
            sums_of_16(q, y[ib].bsums + 2*g);
        }
    }
}
