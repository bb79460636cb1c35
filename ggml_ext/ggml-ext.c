// The C interface (ggml-ext.h) and the dequantizers: the part of libggml-base without SIMD.
#include "ggml-ext-base.h"
#include "encode/metric.h"
#include "encode/upstream.h"

#include "ggml-impl.h"

int ggml_ext_abi_version(void) {
    return GGML_EXT_ABI_VERSION;
}

void ggml_ext_rotate(float * x, int64_t n_blocks, int block_size) {
    for (int64_t ib = 0; ib < n_blocks; ++ib) {
        ggml_ext_rotate_block(x + ib*block_size, block_size);
    }
}

void ggml_ext_rotate_back(float * x, int64_t n_blocks, int block_size) {
    for (int64_t ib = 0; ib < n_blocks; ++ib) {
        ggml_ext_rotate_block_back(x + ib*block_size, block_size);
    }
}

// Dequantize rows: unpack, scale, rotate back.
#define X(NAME, name)                                                                                                  \
    static_assert(sizeof(block_##name) == GGML_EXT_##NAME##_BLOCK_BYTES, #name ": types.toml and the struct differ");  \
    static_assert(GGML_EXT_##NAME##_BLOCK_SIZE/GGML_EXT_##NAME##_GROUP <= GGML_EXT_MAX_GROUPS, #name ": too many groups"); \
    void dequantize_row_##name(const block_##name * x, float * y, int64_t n) {                                         \
        enum { N = GGML_EXT_##NAME##_BLOCK_SIZE };                                                                     \
        assert(n % N == 0);                                                                                            \
        for (int64_t ib = 0; ib < n/N; ++ib, y += N) {                                                                 \
            struct ggml_ext_unpacked u;                                                                                \
            ggml_ext_unpack_##name(&x[ib], &u);                                                                        \
            for (int j = 0; j < N; ++j) {                                                                              \
                y[j] = u.d*(float) u.scale[j/GGML_EXT_##NAME##_GROUP]*((float) u.q[j] - u.offset);                     \
            }                                                                                                          \
            if (GGML_EXT_##NAME##_ROTATED) {                                                                           \
                ggml_ext_rotate_block_back(y, N);                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void quantize_row_##name##_ref(const float * x, void * y, int64_t n) {                                             \
        assert(n % GGML_EXT_##NAME##_BLOCK_SIZE == 0);                                                                 \
        ggml_ext_quantize_chunk(GGML_TYPE_##NAME, x, y, 0, 1, n, NULL, NULL);                                          \
    }
GGML_EXT_WEIGHT_TYPES(X)
#undef X

// Rotate n floats in blocks of block_size and round them to 8 bits under one scale. Return false as ggml_ext_begin_q8() does.
static bool quantize_rotated(const float * x, int n, int block_size, int8_t * q, float * d) {
    float v[QK_K];
    memcpy(v, x, (size_t) n*sizeof(v[0]));
    ggml_ext_rotate(v, n/block_size, block_size);

    float amax   = 0.0f;
    bool  finite = true;
    for (int j = 0; j < n; ++j) {
        finite &= fabsf(v[j]) <= FLT_MAX;
        amax = fmaxf(amax, fabsf(v[j]));
    }
    float inv_d;
    const bool good = ggml_ext_begin_q8(finite ? amax : INFINITY, d, &inv_d);
    for (int j = 0; j < n; ++j) {
        q[j] = good ? (int8_t) nearbyintf(v[j]*inv_d) : 0; // to nearest, ties to even
    }
    return good;
}

static int sum_codes(const int8_t * q, int n) {
    int sum = 0;
    for (int j = 0; j < n; ++j) {
        sum += q[j];
    }
    return sum;
}

// Round to nearest, ties to even, after exact scaling: every SIMD version gives the same bits.
void ggml_ext_quantize_row_q8_kr_ref(const float * x, void * vy, int64_t n) {
    assert(n % QK_K == 0);
    block_q8_K * y = vy;
    for (int64_t ib = 0; ib < n/QK_K; ++ib) {
        int8_t q[QK_K];
        quantize_rotated(x + ib*QK_K, QK_K, QK_K, q, &y[ib].d);
        for (int g = 0; g < 8; ++g) {
            memcpy(y[ib].qs + ggml_ext_group_offset(g), q + 32*g, 32);
        }
        for (int g = 0; g < QK_K/16; ++g) {
            y[ib].bsums[g] = (int16_t) sum_codes(y[ib].qs + 16*g, 16);
        }
    }
}

// Quantize n_values <= 256 floats in blocks of block_size to the members of a block_q8_kr64 or block_q8_kr32.
static void quantize_group(const float * x, int64_t n_values, int block_size, float d[GGML_EXT_GROUP_BLOCKS], float * sum, int8_t * qs) {
    const int L = block_size/8;
    float  v[QK_K] = {0};
    int8_t q[QK_K];
    memcpy(v, x, (size_t) n_values*sizeof(v[0]));
    quantize_rotated(v, QK_K, block_size, q, &d[0]);
    for (int b = 1; b < GGML_EXT_GROUP_BLOCKS; ++b) {
        d[b] = d[0];
    }
    for (int b = 0; b < QK_K/block_size; ++b) {
        sum[b] = (float) sum_codes(q + block_size*b, block_size);
        for (int g = 0; g < 8; ++g) {
            memcpy(qs + ggml_ext_group_offset(g) + L*b, q + block_size*b + L*g, (size_t) L);
        }
    }
}

void ggml_ext_quantize_row_q8_kr64_ref(const float * x, void * vy, int64_t n) {
    assert(n % 64 == 0);
    block_q8_kr64 * y = vy;
    for (int64_t i = 0; i < n; i += QK_K, ++y) {
        quantize_group(x + i, n - i < QK_K ? n - i : QK_K, 64, y->d, y->sum, y->qs);
    }
}

void ggml_ext_quantize_row_q8_kr32_ref(const float * x, void * vy, int64_t n) {
    assert(n % 32 == 0);
    block_q8_kr32 * y = vy;
    for (int64_t i = 0; i < n; i += QK_K, ++y) {
        quantize_group(x + i, n - i < QK_K ? n - i : QK_K, 32, y->d, y->sum, y->qs);
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
    if (params->upstream_sweeps < 0 || params->upstream_sweeps > 16) {
        return 0;
    }
    if (params->itq3_levels != 0 && params->itq3_levels != 3 && params->itq3_levels != 8) {
        return 0;
    }
    // Hessians for single columns serve all scalar types; rotated or sorted ones serve the type they were built for.
    if (params->metric && (params->metric->n_per_row != n_per_row ||
                           (params->metric->type != type && !(upstream_columns(params->metric->type) == 1 && upstream_columns(type) == 1)))) {
        return 0;
    }
    for (int k = 0; k < 8 && params->ditto3_codebook; ++k) {
        const float * c = params->ditto3_codebook;
        if (!(fabsf(c[k]) <= FLT_MAX) || (k > 0 && c[k] < c[k - 1])) {
            return 0;
        }
    }
    if (params->metric && params->metric->upstream) {
        upstream_encode(type, src + start, (char *) dst + ggml_row_size(type, start), nrows, imatrix, params->metric->upstream,
                        params->upstream_sweeps == 0 ? 2 : params->upstream_sweeps);
        return ggml_row_size(type, nrows*n_per_row);
    }
    switch ((int) type) {
#define X(NAME, name)                                                                                                  \
        case GGML_TYPE_##NAME: {                                                                                       \
            const int64_t row_blocks = n_per_row/GGML_EXT_##NAME##_BLOCK_SIZE;                                         \
            GGML_ASSERT(n_per_row % GGML_EXT_##NAME##_BLOCK_SIZE == 0 && start % n_per_row == 0);                      \
            ggml_ext_encode_##name(src + start, (block_##name *) dst + start/n_per_row*row_blocks, nrows, row_blocks,  \
                                   imatrix, params);                                                                   \
            return nrows*row_blocks*sizeof(block_##name);                                                              \
        }
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
    memcpy(q, u.q, (size_t) ggml_blck_size(type));
    memcpy(scale, u.scale, sizeof(u.scale));
    *d      = u.d;
    *offset = u.offset;
    return true;
}

bool ggml_ext_may_be_in_file(enum ggml_type type, const char * tensor_name) {
    const char * retired = NULL;
    switch ((int) type) {
        GGML_EXT_ACTIVATION_CASES
            GGML_LOG_ERROR("%s: tensor '%s' has type %d (%s), which is for activations, not for weights; download or convert the model "
                           "again\n", __func__, tensor_name, (int) type, ggml_type_name(type));
            return false;
#define X(id, name) case id: retired = name; break;
        GGML_EXT_RETIRED_TYPES(X)
#undef X
        default:
            return true;
    }
    GGML_LOG_ERROR("%s: tensor '%s' has type %d, %s before its code was changed; quantize the model again\n", __func__, tensor_name,
                   (int) type, retired);
    return false;
}

bool ggml_ext_validate_row(enum ggml_type type, const void * data, size_t n_blocks) {
    for (size_t ib = 0; ib < n_blocks; ++ib) {
        bool valid = false;
        switch ((int) type) {
#define X(NAME, name) \
            case GGML_TYPE_##NAME: valid = ggml_ext_validate_block_##name((const block_##name *) data + ib); break;
GGML_EXT_WEIGHT_TYPES(X)
#undef X
            case GGML_TYPE_Q8_KR:   valid = isfinite(((const block_q8_K *) data)[ib].d); break;
            case GGML_TYPE_Q8_KR64: // holds groups of a row, so single blocks cannot be checked
            case GGML_TYPE_Q8_KR32: valid = true; break;
        }
        if (!valid) {
            fprintf(stderr, "%s: block %zu of type %s has a scale that is NaN or Inf\n", __func__, ib, ggml_type_name(type));
            return false;
        }
    }
    return true;
}
