// The part of the extension that lives in libggml-base: everything that needs no SIMD backend, once for all types.
#include "ggml-ext-base.h"
#include "encode/encode.h"

int ggml_ext_abi_version(void) {
    return GGML_EXT_ABI_VERSION;
}

void ggml_ext_rotate(float * x, int64_t n_blocks) {
    for (int64_t ib = 0; ib < n_blocks; ++ib) {
        ggml_ext_rotate_block(x + ib*QK_K);
    }
}

void ggml_ext_rotate_back(float * x, int64_t n_blocks) {
    for (int64_t ib = 0; ib < n_blocks; ++ib) {
        ggml_ext_rotate_block_back(x + ib*QK_K);
    }
}

// One row, or several: unpack, scale, rotate back.
#define X(NAME, name)                                                                                                  \
    static_assert(sizeof(block_##name) == GGML_EXT_##NAME##_BLOCK_BYTES, #name ": types.toml and the struct differ");  \
    static_assert(QK_K/GGML_EXT_##NAME##_GROUP <= GGML_EXT_MAX_GROUPS, #name ": too many groups");                     \
    void dequantize_row_##name(const block_##name * x, float * y, int64_t n) {                                         \
        assert(n % QK_K == 0);                                                                                         \
        for (int64_t ib = 0; ib < n/QK_K; ++ib, y += QK_K) {                                                           \
            struct ggml_ext_unpacked u;                                                                                \
            ggml_ext_unpack_##name(&x[ib], &u);                                                                        \
            for (int j = 0; j < QK_K; ++j) {                                                                           \
                y[j] = u.d*(float) u.scale[j/GGML_EXT_##NAME##_GROUP]*((float) u.q[j] - u.offset);                     \
            }                                                                                                          \
            if (GGML_EXT_##NAME##_ROTATED) {                                                                           \
                ggml_ext_rotate_block_back(y);                                                                               \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void quantize_row_##name##_ref(const float * x, void * y, int64_t n) {                                             \
        assert(n % QK_K == 0);                                                                                         \
        ggml_ext_quantize_chunk(GGML_TYPE_##NAME, x, y, 0, 1, n, NULL, NULL);                                          \
    }
GGML_EXT_WEIGHT_TYPES(X)
#undef X

// Scales are positive and there is no rounding choice left to the compiler, so every SIMD version equals this one.
void ggml_ext_quantize_row_q8_kr_ref(const float * x, void * vy, int64_t n) {
    assert(n % QK_K == 0);
    block_q8_K * y = vy;
    for (int64_t ib = 0; ib < n/QK_K; ++ib) {
        float v[QK_K];
        memcpy(v, x + ib*QK_K, sizeof(v));
        ggml_ext_rotate_block(v);

        float amax   = 0.0f;
        bool  finite = true;
        for (int j = 0; j < QK_K; ++j) {
            finite &= fabsf(v[j]) <= FLT_MAX;
            amax = fmaxf(amax, fabsf(v[j]));
        }
        float inv_d;
        if (!ggml_ext_begin_q8_kr(&y[ib], finite ? amax : INFINITY, &inv_d)) {
            continue;
        }
        for (int j = 0; j < QK_K; ++j) {
            y[ib].qs[j] = (int8_t) nearbyintf(v[j]*inv_d); // to nearest, ties to even
        }
        for (int g = 0; g < QK_K/16; ++g) {
            int sum = 0;
            for (int j = 0; j < 16; ++j) {
                sum += y[ib].qs[16*g + j];
            }
            y[ib].bsums[g] = (int16_t) sum;
        }
    }
}

size_t ggml_ext_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows,
                               int64_t n_per_row, const float * imatrix,
                               const struct ggml_ext_quantize_params * params) {
    static const struct ggml_ext_quantize_params defaults = {0};
    if (params == NULL) {
        params = &defaults;
    }
    if (params->trellis_passes < 0 || params->trellis_passes > 6) {
        return 0;
    }
    if (params->itq3_levels != 0 && params->itq3_levels != 3 && params->itq3_levels != 8) {
        return 0;
    }
    for (int k = 0; k < 8 && params->ditto3_codebook; ++k) {
        const float * c = params->ditto3_codebook;
        if (!(fabsf(c[k]) <= FLT_MAX) || (k > 0 && c[k] < c[k - 1])) {
            return 0;
        }
    }
    GGML_ASSERT(n_per_row % QK_K == 0 && start % n_per_row == 0);
    const int64_t row_blocks = n_per_row/QK_K;
    const int64_t first      = start/n_per_row*row_blocks;
    switch ((int) type) {
#define X(NAME, name)                                                                                                  \
        case GGML_TYPE_##NAME:                                                                                         \
            for (int64_t ir = 0; ir < nrows; ++ir) {                                                                   \
                ggml_ext_encode_##name(src + start + ir*n_per_row, (block_##name *) dst + first + ir*row_blocks,       \
                                       row_blocks, imatrix, params);                                                   \
            }                                                                                                          \
            return nrows*row_blocks*sizeof(block_##name);
GGML_EXT_WEIGHT_TYPES(X)
#undef X
    }
    return 0;
}

bool ggml_ext_unpack_block(enum ggml_type type, const void * block, int8_t * q, int32_t * scale, float * d,
                           float * offset) {
    struct ggml_ext_unpacked u = {0};
    switch ((int) type) {
#define X(NAME, name) case GGML_TYPE_##NAME: ggml_ext_unpack_##name((const block_##name *) block, &u); break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
        default: return false;
    }
    memcpy(q, u.q, sizeof(u.q));
    memcpy(scale, u.scale, sizeof(u.scale));
    *d      = u.d;
    *offset = u.offset;
    return true;
}

bool ggml_ext_validate_row(enum ggml_type type, const void * data, size_t n_blocks) {
    for (size_t ib = 0; ib < n_blocks; ++ib) {
        bool valid = false;
        switch ((int) type) {
#define X(NAME, name) \
            case GGML_TYPE_##NAME: valid = ggml_ext_validate_block_##name((const block_##name *) data + ib); break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
            case GGML_TYPE_Q8_KR: valid = isfinite(((const block_q8_K *) data)[ib].d); break;
        }
        if (!valid) {
            fprintf(stderr, "%s: block %zu of type %s has a scale that is NaN or Inf\n", __func__, ib, ggml_type_name(type));
            return false;
        }
    }
    return true;
}
