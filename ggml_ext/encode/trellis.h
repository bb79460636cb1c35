// Encoder of the trellis types: Viterbi's algorithm over the 4096 states of types/trellis.h.
//
// A step takes, for each of the 4096/2^K groups of states that share all bits but the oldest symbol, the least cost, and adds
// the squared distances of the new symbols. It keeps the minima of every step and no pointers: on the way back the one
// predecessor of each step is found again from them, which costs nothing beside the forward steps. Costs lie in planes by the
// newest symbol, so that all loops but one run over neighbours and compilers vectorise them. Every float operation has one
// order, so that the numpy reference gives the same bytes; the file is compiled with -ffp-contract=off.
#pragma once

#include "encode.h"

#include "../types/trellis.h"

#include <stdlib.h>

// Where the build is for any x86-64, the search is compiled for newer ones too and the processor chooses.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__AVX2__)
#define TRELLIS_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define TRELLIS_CLONES
#endif

enum {
    TRELLIS_MAX_GROUPS = GGML_EXT_TRELLIS_STATES/4, // K = 2
    TRELLIS_PASSES     = 3,  // scales tried by default: 0.0182, 0.0180, 0.0180 on a Gaussian for 1, 2, 3 (ITQ3_T)
    TRELLIS_MAX_PASSES = 6,
    TRELLIS_N_STARTS   = 256,
};

struct trellis_work {
    float    code[GGML_EXT_TRELLIS_STATES];        // values of the states, in planes
    float    cost[GGML_EXT_TRELLIS_STATES];        // in planes: plane a, place j is state j << K | a
    float    planes[TRELLIS_MAX_GROUPS];
    float    least[QK_K][TRELLIS_MAX_GROUPS];      // of each step, before its symbol: by state >> K
    float    code_rms;
};

static inline struct trellis_work * trellis_begin(const struct ggml_ext_trellis_tables * tables, int k, float offset) {
    struct trellis_work * w = malloc(sizeof(*w));
    GGML_ASSERT(w != NULL);
    const int n_groups = GGML_EXT_TRELLIS_STATES >> k;
    double sum = 0;
    for (int s = 0; s < GGML_EXT_TRELLIS_STATES; ++s) {
        const float v = (float) ggml_ext_trellis_code(tables, k, s) - offset;
        w->code[(s & ((1 << k) - 1))*n_groups + (s >> k)] = v;
        sum += (double) v*v;
    }
    w->code_rms = (float) sqrt(sum/GGML_EXT_TRELLIS_STATES);
    return w;
}

// least[j] = min over the oldest symbol of the cost of the states that lead to j
static inline __attribute__((always_inline)) void trellis_merge(int k, const float * cost, float * planes, float * least) {
    const int n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k, n = n_groups >> k;
    for (int a = 0; a < n_symbols; ++a) {
        for (int r = 0; r < n; ++r) {
            float m = cost[a*n_groups + r];
            for (int p = 1; p < n_symbols; ++p) {
                const float c = cost[a*n_groups + p*n + r];
                m = c < m ? c : m;
            }
            planes[a*n + r] = m;
        }
    }
    for (int r = 0; r < n; ++r) {
        for (int a = 0; a < n_symbols; ++a) {
            least[r*n_symbols + a] = planes[a*n + r];
        }
    }
}

static inline __attribute__((always_inline)) void trellis_branch(int k, const float * least, const float * code, float x, float * cost) {
    const int n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k;
    for (int a = 0; a < n_symbols; ++a) {
        for (int j = 0; j < n_groups; ++j) {
            const float e = x - code[a*n_groups + j];
            cost[a*n_groups + j] = least[j] + e*e;
        }
    }
}

// States of least squared error of x[0 .. n-1], in units of d, that follow one of the first n_starts states before, or if
// that is 0 the state `before`.
static inline __attribute__((always_inline)) void trellis_search(int k, struct trellis_work * w, const float * x, int n,
                                                                 int n_starts, int before, uint16_t * states) {
    const int n_symbols = 1 << k, n_groups = GGML_EXT_TRELLIS_STATES >> k;
    for (int j = 0; j < n_groups; ++j) {
        w->least[0][j] = (n_starts ? j < n_starts : j == (before & (n_groups - 1))) ? 0.0f : FLT_MAX;
    }
    trellis_branch(k, w->least[0], w->code, x[0], w->cost);
    for (int t = 1; t < n; ++t) {
        trellis_merge(k, w->cost, w->planes, w->least[t]);
        trellis_branch(k, w->least[t], w->code, x[t], w->cost);
    }
    int at = 0;
    for (int i = 1; i < GGML_EXT_TRELLIS_STATES; ++i) {
        at = w->cost[i] < w->cost[at] ? i : at;
    }
    int state = (at % n_groups) << k | at/n_groups;
    states[n - 1] = (uint16_t) state;
    for (int t = n - 1; t > 0; --t) {
        float least = INFINITY;
        int   from  = 0;
        for (int p = 0; p < n_symbols; ++p) {
            const int   q = p*n_groups + (state >> k);
            const float e = x[t - 1] - w->code[(q & (n_symbols - 1))*n_groups + (q >> k)];
            const float c = w->least[t - 1][q >> k] + e*e;
            if (c < least) {
                least = c;
                from  = q;
            }
        }
        state = from;
        states[t - 1] = (uint16_t) state;
    }
}

struct trellis_best {
    float    err;
    uint8_t  d;
    uint16_t states[QK_K];
    bool     found;
};

// Largest scale of one byte that is not above v.
static inline int trellis_scale_below(float v) {
    if (!(v < ggml_ext_e5m3_to_float(GGML_EXT_E5M3_MAX))) {
        return GGML_EXT_E5M3_MAX;
    }
    if (v <= 0.0f) {
        return 0;
    }
    const int d = ggml_fp32_to_fp16(v/GGML_EXT_E5M3_FACTOR) >> 7;
    return d > 0 && ggml_ext_e5m3_to_float((uint8_t) d) > v ? d - 1 : d;
}

// The scale next to v that was not tried yet: the nearer one, else the other; -1 if there is none.
static inline int trellis_next_scale(float v, const uint8_t * tried, int n_tried) {
    const int lo = trellis_scale_below(v), up = lo < GGML_EXT_E5M3_MAX ? lo + 1 : lo;
    const bool up_first = ggml_ext_e5m3_to_float((uint8_t) up) - v < v - ggml_ext_e5m3_to_float((uint8_t) lo);
    const int order[2] = {up_first ? up : lo, up_first ? lo : up};
    for (int i = 0; i < 2; ++i) {
        if (order[i] > 0 && (n_tried == 0 || memchr(tried, order[i], (size_t) n_tried) == NULL)) {
            return order[i];
        }
    }
    return -1;
}

// One block: x by step, rotated. Tries scales from the one that gives the code the block's energy, then those next to the
// least-squares scale of the codes found.
static inline __attribute__((always_inline)) void trellis_encode(int k, struct trellis_work * w, const float x[QK_K], int n_passes,
                                                                 struct trellis_best * best) {
    const int n_groups = GGML_EXT_TRELLIS_STATES >> k;
    uint8_t  tried[TRELLIS_MAX_PASSES];
    uint16_t states[QK_K];
    ext_f32  energy[2] = {0};
    for (int i = 0; i < QK_K/4; ++i) {
        energy[i%2] += ext_load(x + 4*i)*ext_load(x + 4*i);
    }
    best->err   = ext_sum(energy); // of d = 0, which stays if nothing beats it
    best->d     = 0;
    best->found = false;
    float want = sqrtf(best->err*(1.0f/QK_K))/w->code_rms;
    for (int pass = 0; pass < n_passes; ++pass) {
        const int scale = trellis_next_scale(want, tried, pass);
        if (scale < 0) {
            return;
        }
        tried[pass] = (uint8_t) scale;
        const float d = ggml_ext_e5m3_to_float((uint8_t) scale), inv_d = 1.0f/d;
        float z[QK_K], v[QK_K];
        for (int t = 0; t < QK_K; ++t) {
            z[t] = x[t]*inv_d;
        }
        trellis_search(k, w, z, QK_K, TRELLIS_N_STARTS, 0, states);
        for (int t = 0; t < QK_K; ++t) {
            v[t] = w->code[(states[t] & ((1 << k) - 1))*n_groups + (states[t] >> k)];
        }
        ext_f32 xv[2] = {0}, vv[2] = {0}, err[2] = {0};
        for (int i = 0; i < QK_K/4; ++i) {
            const ext_f32 xi = ext_load(x + 4*i), vi = ext_load(v + 4*i), e = xi - d*vi;
            xv[i%2]  += xi*vi;
            vv[i%2]  += vi*vi;
            err[i%2] += e*e;
        }
        const float error = ext_sum(err);
        if (error < best->err) {
            best->err   = error;
            best->d     = (uint8_t) scale;
            best->found = true;
            memcpy(best->states, states, sizeof(states));
        }
        const float sum_vv = ext_sum(vv);
        want = sum_vv > 0.0f ? ext_sum(xv)/sum_vv : 0.0f;
    }
}

// The bytes of a path. qh NULL for K = 2.
static inline void trellis_pack(int k, const struct trellis_best * best, uint8_t * start, uint8_t ql[64], uint8_t * qh) {
    memset(ql, 0, 64);
    if (qh) {
        memset(qh, 0, 32);
    }
    *start = 0;
    if (!best->found) {
        return;
    }
    for (int t = 0; t < QK_K; ++t) {
        const int j = ggml_ext_trellis_position(t), c = best->states[t] & ((1 << k) - 1);
        ql[32*(j/128) + j%32] |= (uint8_t) ((c & 3) << 2*((j%128)/32));
        if (qh) {
            qh[j%32] |= (uint8_t) ((c >> 2) << (j/32));
        }
    }
    const int before = best->states[0] >> k;
    for (int s = 0; s < TRELLIS_N_STARTS; ++s) { // start is a permutation of these states' bits
        if (ggml_ext_trellis_start_state(k, (uint8_t) s) == before) {
            *start = (uint8_t) s;
        }
    }
}

// QH: the field of block b with the high bits, or NULL.
#define DEFINE_TRELLIS_ENCODER(name, NAME, K, QH)                                                                          \
    TRELLIS_CLONES                                                                                                         \
    void ggml_ext_encode_##name(const float * src, block_##name * dst, int64_t n_blocks, const float * importance,         \
                                const struct ggml_ext_quantize_params * params) {                                          \
        (void) importance;                                                                                                 \
        struct trellis_work * w = trellis_begin(&ggml_ext_##name##_tables, K, GGML_EXT_##NAME##_TRELLIS_OFFSET);           \
        const int n_passes = params->trellis_passes ? params->trellis_passes : TRELLIS_PASSES;                             \
        for (int64_t ib = 0; ib < n_blocks; ++ib) {                                                                        \
            float r[QK_K], x[QK_K];                                                                                        \
            struct trellis_best best = {0};                                                                                \
            const bool finite = ext_load_rotated(src + ib*QK_K, r);                                                        \
            for (int t = 0; t < QK_K; ++t) {                                                                               \
                x[t] = r[ggml_ext_trellis_position(t)];                                                                    \
            }                                                                                                              \
            if (finite) {                                                                                                  \
                trellis_encode(K, w, x, n_passes, &best);                                                                  \
            } else {                                                                                                       \
                best.d = 0xff; /* refused by row validation */                                                             \
            }                                                                                                              \
            block_##name * b = &dst[ib];                                                                                   \
            b->d = best.d;                                                                                                 \
            trellis_pack(K, &best, &b->start, b->ql, QH);                                                                  \
        }                                                                                                                  \
        free(w);                                                                                                           \
    }
