// Rotation fused with the 8-bit quantization of activation rows. Bit-equal to ggml_ext_quantize_row_q8_kr_ref(), ..._q8_kr64_ref()
// and ..._q8_kr32_ref(): the same butterflies in the same order.
#include "ggml-ext-cpu.h"
#include "../ggml-ext-rotation.h"
#include "simd.h"

#include <algorithm>

using namespace ggml_ext;

// One stage across N registers; r[i] pairs with r[i + stride].
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
    alignas(32) float factor[QK_K];
    constexpr sign_factors() : factor() {
        for (int j = 0; j < QK_K; ++j) {
            factor[j] = ggml_ext_signs[j/32] >> j%32 & 1 ? -1.0f : 1.0f;
        }
    }
};
static constexpr sign_factors signs;

// Butterflies of 8*N values at strides 1 to 4*N, in N = 8 or 4 registers.
template <int N> static inline void transform(const float * x, const float * factors, f32x8 (&r)[N]) {
    for (int k = 0; k < N; ++k) {
        r[k] = butterfly<4>(butterfly<2>(butterfly<1>(load(x + 8*k)*load(factors + 8*k))));
    }
    for (int stride = 1; stride < N; stride *= 2) {
        butterflies(r, stride);
    }
}

// v = R x for a block of 256, in two passes, the second with 4 registers at strides 64 and 128, so that nothing spills. Return the largest
// magnitude; Inf or NaN if there is one.
static inline float rotate256(const float * x, float * v) {
    for (int i = 0; i < QK_K; i += 64) {
        f32x8 r[8];
        transform(x + i, signs.factor + i, r);
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

// The same for n <= 256 values in blocks of N = 64 or 32.
template <int N> static inline float rotate_short(const float * x, int64_t n, float * v) {
    magnitude_max amax;
    for (int64_t i = 0; i < n; i += N) {
        f32x8 r[N/8];
        transform(x + i, signs.factor, r);
        for (int k = 0; k < N/8; ++k) {
            r[k] = r[k]*(float) ggml_ext_rotation_scale(N);
            amax.add(r[k]);
            store(v + i + 8*k, r[k]);
        }
    }
    return amax.total();
}

// Quantize 32 values, eight each at v, v + stride, v + 2*stride and v + 3*stride.
static inline u8x32 quantize_codes(const float * v, int stride, float inv_d) {
    f32x8 scaled[4];
    for (int k = 0; k < 4; ++k) {
        scaled[k] = load(v + k*stride)*inv_d;
    }
    return round_to_i8(scaled);
}

void ggml_ext_quantize_row_q8_kr(const float * x, void * vy, int64_t n) {
    assert(n % QK_K == 0);
    block_q8_K * y = (block_q8_K *) vy;
    for (int64_t ib = 0; ib < n/QK_K; ++ib, x += QK_K) {
        alignas(32) float v[QK_K];
        float inv_d;
        if (!ggml_ext_begin_q8(rotate256(x, v), &y[ib].d, &inv_d)) {
            memset(y[ib].qs, 0, sizeof(y[ib].qs));
            memset(y[ib].bsums, 0, sizeof(y[ib].bsums));
            continue;
        }
        for (int g = 0; g < QK_K/32; ++g) {
            const u8x32 q  = quantize_codes(v + 32*g, 8, inv_d);
            const int   offset = ggml_ext_group_offset(g);
            store((uint8_t *) y[ib].qs + offset, q);
            sums_of_16(q, y[ib].bsums + offset/16);
        }
    }
}

// Quantize the rotated values v of four blocks of 64.
static inline void quantize_group(const float (&v)[QK_K], float inv_d, block_q8_kr64 & y) {
    sums_of_8 sums;
    for (int g = 0; g < 8; ++g) {
        const u8x32 q = quantize_codes(v + 8*g, 64, inv_d);
        store((uint8_t *) y.qs + ggml_ext_group_offset(g), q);
        sums.add(q);
    }
    sums.total(y.sum);
}

// The same for eight blocks of 32.
static inline void quantize_group(const float (&v)[QK_K], float inv_d, block_q8_kr32 & y) {
    for (int b = 0; b < GGML_EXT_GROUP_BLOCKS_32; ++b) {
        int8_t q[32];
        store((uint8_t *) q, quantize_codes(v + 32*b, 8, inv_d));
        int sum = 0;
        for (int j = 0; j < 32; ++j) {
            sum += q[j];
        }
        y.sum[b] = (float) sum;
        for (int g = 0; g < 8; ++g) {
            memcpy(y.qs + ggml_ext_group_offset(g) + 4*b, q + 4*g, 4);
        }
    }
}

template <int N, typename Y> static inline void quantize_row(const float * x, Y * y, int64_t n) {
    assert(n % N == 0);
    for (int64_t i = 0; i < n; i += QK_K, ++y) {
        alignas(32) float v[QK_K];
        const int64_t n_values = n - i < QK_K ? n - i : QK_K;
        float d, inv_d;
        if (n_values < QK_K) {
            memset(v, 0, sizeof(v));
        }
        const bool finite = ggml_ext_begin_q8(rotate_short<N>(x + i, n_values, v), &d, &inv_d);
        std::fill(y->d, y->d + GGML_EXT_GROUP_BLOCKS, d);
        if (!finite) {
            memset(y->sum, 0, sizeof(y->sum));
            memset(y->qs, 0, sizeof(y->qs));
            continue;
        }
        quantize_group(v, inv_d, *y);
    }
}

void ggml_ext_quantize_row_q8_kr64(const float * x, void * y, int64_t n) {
    quantize_row<64>(x, (block_q8_kr64 *) y, n);
}

void ggml_ext_quantize_row_q8_kr32(const float * x, void * y, int64_t n) {
    quantize_row<32>(x, (block_q8_kr32 *) y, n);
}

// Multiply x by the signs of its blocks.
static void flip_signs(const float * x, int64_t n, int block_size, float * y) {
    for (int64_t b = 0; b < n; b += block_size) {
        for (int j = 0; j < block_size; ++j) {
            y[b + j] = x[b + j]*signs.factor[j];
        }
    }
}

// R^-1 = S H = S R S.
void ggml_ext_rotate_activations_back(float * x, int64_t n, int block_size) {
    assert(n % block_size == 0 && n <= QK_K);
    alignas(32) float v[QK_K];
    flip_signs(x, n, block_size, v);
    switch (block_size) {
        case QK_K: rotate256(v, x); break;
        case 64:   rotate_short<64>(v, n, x); break;
        case 32:   rotate_short<32>(v, n, x); break;
        default:   GGML_ABORT("blocks of %d", block_size);
    }
    flip_signs(x, n, block_size, x);
}
