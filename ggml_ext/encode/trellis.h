// Encoder of the trellis types: scales around the search of trellis-search.h, and errors that are fed back. Every float operation
// has one order, so that the numpy reference gives the same bytes; the file is compiled with -ffp-contract=off.
#pragma once

#include "trellis-search.h"

// Where the build is for any x86-64, the search is compiled for newer ones too and the processor chooses.
#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 12 && !defined(__AVX2__)
#define TRELLIS_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define TRELLIS_CLONES
#endif

// Added to importances, of their mean. They are estimates, and squared ones: what little the diagonal says of small errors is
// best taken half. Perplexity and KL divergence of the reference model with an importance matrix, 600 chunks, measured before the
// rotation had signs; plain: without.
//          0.01            0.1             0.3             1               plain
//   K = 3  11.294 0.0224   11.286 0.0228   11.279 0.0239   11.249 0.0233   11.261 0.0242
//   K = 2  12.430 0.1147   12.534 0.1240   12.515 0.1236   12.572 0.1243   12.612 0.1272
#define TRELLIS_FLOOR(K) ((K) == 3 ? 1.0 : 0.01)

enum {
    TRELLIS_PASSES     = 3,  // scales tried by default: 0.0184, 0.0179, 0.0178 on a Gaussian for 1, 2, 3 (ITQ3_T)
    TRELLIS_MAX_PASSES = 6,
    TRELLIS_N_STARTS   = 256,
    TRELLIS_SEGMENT    = 32, // steps that are decided together where errors are fed back; weighted errors of a layer's
                             // ffn_down and attn_q at K = 3: 16 0.00691 0.01703, 32 0.00711 0.01694, 64 0.00771 0.01694
    TRELLIS_LOOKAHEAD  = 32, // steps searched beyond them
    TRELLIS_MAX_SEGMENTS = QK_K/TRELLIS_SEGMENT,
    TRELLIS_N_ODD      = 4, // further scales for blocks unlike a bell
};

// Times the error of a Gaussian, the relative squared error from which a block is taken for one. Errors of short blocks scatter
// more.
#define TRELLIS_ODD(N) ((N) == QK_K ? 1.15f : 1.30f)

// Importances m of the unrotated weights make the squared error a full quadratic form of the errors e of the rotated ones,
// e^T H diag(m) H e, in which the signs of R = H S cancel. A block-triangular factorization of it (GPTQ's and LDLQ's error
// feedback) says by how much the segments still to come can make up for the errors of those decided. H is a tensor product, so
// after a transform inside each segment the form falls apart into one matrix per frequency f, with entries that depend on s ^ r alone:
//   sum over f and s of D[f][s]*(E[s][f] + sum over r < s of gain[f][s][r]*E[r][f])^2,   E[s] = transform of segment s of e
// D is left out inside a segment. It is nearly flat where importances vary by less than the feedback gains.
struct trellis_feedback {
    float importance[QK_K]; // unrotated
    float gain[TRELLIS_SEGMENT][TRELLIS_MAX_SEGMENTS][TRELLIS_MAX_SEGMENTS];
};

// Walsh-Hadamard transform of n values, a power of two, not normalised.
static inline void trellis_transform(float * x, int n) {
    for (int stride = 1; stride < n; stride *= 2) {
        for (int i = 0; i < n; ++i) {
            if (!(i & stride)) {
                const float u = x[i], v = x[i + stride];
                x[i]          = u + v;
                x[i + stride] = u - v;
            }
        }
    }
}

// False if all importances are zero: then they say nothing.
static inline bool trellis_begin_feedback(struct trellis_type t, const float * importance, struct trellis_feedback * fb) {
    const int n = t.n, n_segments = n/TRELLIS_SEGMENT;
    double sum = 0;
    for (int j = 0; j < n; ++j) {
        sum += (double) importance[j];
    }
    if (!(sum > 0)) {
        return false;
    }
    for (int j = 0; j < n; ++j) {
        fb->importance[j] = (float) ((double) importance[j]*(n/sum) + TRELLIS_FLOOR(t.k)); // mean 1, and no zeros to divide by
    }
    for (int f = 0; f < TRELLIS_SEGMENT; ++f) {
        float  a[TRELLIS_MAX_SEGMENTS];
        double m[TRELLIS_MAX_SEGMENTS][TRELLIS_MAX_SEGMENTS];
        for (int s = 0; s < n_segments; ++s) {
            a[s] = fb->importance[ggml_ext_trellis_position(n, TRELLIS_SEGMENT*s + f)];
        }
        trellis_transform(a, n_segments);
        for (int s = 0; s < n_segments; ++s) {
            for (int r = 0; r < n_segments; ++r) {
                m[s][r] = (double) a[s ^ r];
            }
        }
        for (int s = n_segments - 1; s >= 0; --s) { // eliminates the last segment first: it can react to all others
            for (int r = 0; r < s; ++r) {
                fb->gain[f][s][r] = (float) (m[s][r]/m[s][s]);
                for (int q = 0; q < s; ++q) {
                    m[r][q] -= m[s][r]*m[s][q]/m[s][s];
                }
            }
        }
    }
    return true;
}

struct trellis_best {
    float    err;
    uint8_t  d;
    uint16_t states[QK_K]; // of d = 0: all zero
};

// States for x, by step, under scale d: segment after segment, each with the errors of those before fed back.
static inline __attribute__((always_inline)) void trellis_search_feedback(struct trellis_type t, struct trellis_work * w,
                                                                          const float * x, float d, const struct trellis_feedback * fb,
                                                                          uint16_t * states) {
    enum { S = TRELLIS_SEGMENT };
    float errors[TRELLIS_MAX_SEGMENTS][S]; // transformed
    for (int s = 0; s < t.n/S; ++s) {
        const int first = S*s, n = first + S + TRELLIS_LOOKAHEAD < t.n ? S + TRELLIS_LOOKAHEAD : t.n - first;
        float z[2*S];
        for (int i = 0; i < n; i += S) {
            float wish[S] = {0};
            for (int r = 0; r < s; ++r) {
                for (int f = 0; f < S; ++f) {
                    wish[f] += fb->gain[f][s + i/S][r]*errors[r][f];
                }
            }
            trellis_transform(wish, S);
            for (int j = 0; j < S && i + j < n; ++j) {
                z[i + j] = (x[first + i + j] + wish[j]*(1.0f/S))*(1.0f/d);
            }
        }
        uint16_t found[2*S];
        trellis_search(t.k, w, z, n, s == 0 ? TRELLIS_N_STARTS : 0, s == 0 ? 0 : states[first - 1], found);
        for (int j = 0; j < S; ++j) {
            states[first + j] = found[j];
            errors[s][j]      = x[first + j] - d*trellis_value(t.k, w, found[j]);
        }
        trellis_transform(errors[s], S);
    }
}

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

// Sums over a block of n, of weights weighted by m or of all alike where it is NULL: x*v, v*v and (x - d*v)^2.
static inline void trellis_sums(int n, const float * x, const float * v, const float * m, float d, float * xv, float * vv,
                                float * err) {
    ext_f32 sum_xv[2] = {0}, sum_vv[2] = {0}, sum_err[2] = {0};
    for (int i = 0; i < n/4; ++i) {
        const ext_f32 xi = ext_load(x + 4*i), vi = ext_load(v + 4*i), e = xi - d*vi;
        const ext_f32 mi = m ? ext_load(m + 4*i) : (ext_f32) {1.0f, 1.0f, 1.0f, 1.0f};
        sum_xv[i%2]  += mi*xi*vi;
        sum_vv[i%2]  += mi*vi*vi;
        sum_err[i%2] += mi*e*e;
    }
    *xv  = ext_sum(sum_xv);
    *vv  = ext_sum(sum_vv);
    *err = ext_sum(sum_err);
}

// What trellis_encode() knows of its block.
struct trellis_block {
    float x[QK_K]; // rotated, by step
    float y[QK_K]; // rotated, or with feedback the weights themselves up to the signs
    const struct trellis_feedback * fb;
};

// States for the block under one scale, which are kept if they are the best so far. Returns the least-squares scale for them.
static inline __attribute__((always_inline)) float trellis_try_scale(struct trellis_type t, struct trellis_work * w,
                                                                     const struct trellis_block * in, int scale,
                                                                     bool feed_back, struct trellis_best * best) {
    const float d = ggml_ext_e5m3_to_float((uint8_t) scale), inv_d = 1.0f/d;
    uint16_t states[QK_K];
    float    v[QK_K], xv, vv, err;
    if (feed_back) {
        trellis_search_feedback(t, w, in->x, d, in->fb, states);
    } else {
        for (int i = 0; i < t.n; ++i) {
            v[i] = in->x[i]*inv_d;
        }
        trellis_search(t.k, w, v, t.n, TRELLIS_N_STARTS, 0, states);
    }
    for (int i = 0; i < t.n; ++i) {
        v[ggml_ext_trellis_position(t.n, i)] = trellis_value(t.k, w, states[i]);
    }
    if (in->fb) {
        ggml_ext_fwht(v, t.n);
    }
    trellis_sums(t.n, in->y, v, in->fb ? in->fb->importance : NULL, d, &xv, &vv, &err);
    if (err < best->err) {
        best->err = err;
        best->d   = (uint8_t) scale;
        memcpy(best->states, states, (size_t) t.n*sizeof(states[0]));
    }
    return vv > 0.0f ? xv/vv : 0.0f;
}

// One block of rotated weights. Tries scales from the one that gives the code the block's energy, then those next to the
// least-squares scale of the codes found. With feedback the errors are those of the weights rotated back, up to the signs.
static inline __attribute__((always_inline)) void trellis_encode(struct trellis_type t, struct trellis_work * w, const float * rotated,
                                                                 const struct trellis_feedback * fb, int n_passes,
                                                                 struct trellis_best * best) {
    uint8_t tried[TRELLIS_MAX_PASSES + TRELLIS_N_ODD];
    int     n_tried = 0;
    float   energy, weighted, unused, peak = 0.0f;
    struct trellis_block in = {.fb = fb};
    for (int i = 0; i < t.n; ++i) {
        in.x[i] = rotated[ggml_ext_trellis_position(t.n, i)];
        peak    = fmaxf(peak, fabsf(in.x[i]));
    }
    memcpy(in.y, rotated, (size_t) t.n*sizeof(in.y[0]));
    if (fb) {
        ggml_ext_fwht(in.y, t.n);
    }
    trellis_sums(t.n, in.y, in.y, NULL, 0.0f, &energy, &unused, &unused);
    trellis_sums(t.n, in.y, in.y, fb ? fb->importance : NULL, 0.0f, &weighted, &unused, &unused);
    *best = (struct trellis_best) {.err = weighted}; // of d = 0, which stays if nothing beats it
    const float first = sqrtf(energy*(1.0f/t.n))/w->code_rms;
    float want = first;
    for (int pass = 0; pass < n_passes; ++pass) {
        const bool looks = fb != NULL && pass == 0 && n_passes > 1; // without feedback, for the scale alone: it is cheap
        const int  scale = trellis_next_scale(want, tried, n_tried);
        if (scale < 0) {
            break;
        }
        want = trellis_try_scale(t, w, &in, scale, fb != NULL && !looks, best);
        if (!looks) {
            tried[n_tried++] = (uint8_t) scale;
        }
    }
    // Blocks unlike a bell want other scales: few values, many alike, or one that stands out.
    const float odd[TRELLIS_N_ODD] = {1.3f*first, 1.6f*first, 0.75f*first, peak/w->code_top};
    for (int i = 0; i < TRELLIS_N_ODD && best->err > TRELLIS_ODD(t.n)*t.usual*weighted; ++i) {
        const int scale = trellis_next_scale(odd[i], tried, n_tried);
        if (scale > 0) {
            trellis_try_scale(t, w, &in, scale, fb != NULL, best);
            tried[n_tried++] = (uint8_t) scale;
        }
    }
}

// The bytes of a path. qh NULL for K = 2.
static inline void trellis_pack(int k, int n, const struct trellis_best * best, uint8_t * start, uint8_t * ql, uint8_t * qh) {
    uint8_t symbols[QK_K];
    for (int t = 0; t < n; ++t) {
        symbols[ggml_ext_trellis_position(n, t)] = (uint8_t) (best->states[t] & ((1 << k) - 1));
    }
    ggml_ext_pack_bits3(symbols, n, ql, qh);
    const int before = best->states[0] >> k;
    *start = 0;
    for (int s = 0; s < TRELLIS_N_STARTS; ++s) { // start is a permutation of these states' bits
        if (ggml_ext_trellis_start_state(k, (uint8_t) s) == before) {
            *start = (uint8_t) s;
        }
    }
}

// QH: the field of block b with the high bits, or NULL.
#define DEFINE_TRELLIS_ENCODER(name, NAME, K, QH)                                                                          \
    TRELLIS_CLONES                                                                                                         \
    void ggml_ext_encode_##name(const float * src, block_##name * dst, int64_t n_rows, int64_t row_blocks,                 \
                                const float * importance, const struct ggml_ext_quantize_params * params) {                \
        enum { N = GGML_EXT_##NAME##_BLOCK_SIZE };                                                                         \
        const struct trellis_type t = {K, N, &ggml_ext_##name##_tables, GGML_EXT_##NAME##_TRELLIS_OFFSET,                  \
                                       GGML_EXT_##NAME##_TRELLIS_USUAL_REL_MSE};                                           \
        struct trellis_work * w = trellis_begin(t);                                                                        \
        const int n_passes = params->trellis_passes ? params->trellis_passes : TRELLIS_PASSES;                             \
        for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {                                                               \
            float rotated[N];                                                                                              \
            struct trellis_best best = {0};                                                                                \
            struct trellis_feedback fb;                                                                                    \
            const bool weighted = importance && trellis_begin_feedback(t, importance + ib%row_blocks*N, &fb);              \
            if (ext_load_rotated(src + ib*N, rotated, N)) {                                                                \
                trellis_encode(t, w, rotated, weighted ? &fb : NULL, n_passes, &best);                                     \
            } else {                                                                                                       \
                best.d = 0xff; /* refused by row validation */                                                             \
            }                                                                                                              \
            block_##name * b = &dst[ib];                                                                                   \
            b->d = best.d;                                                                                                 \
            trellis_pack(K, N, &best, &b->start, b->ql, QH);                                                               \
        }                                                                                                                  \
        trellis_end(w);                                                                                                    \
    }
