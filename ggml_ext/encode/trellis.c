// Encoder of the trellis types: scales and error feedback around the search of trellis-search.h. Every float operation has one
// order, so that the numpy reference gives the same bytes; the file is compiled with -ffp-contract=off.
#include "rows.h"
#include "trellis-search.h"

enum {
    TRELLIS_MAX_SCALES = 6,  // scale candidates per block
    TRELLIS_N_EXTRA    = 4,  // further ones for blocks that are not Gaussian
    TRELLIS_MAX_SEARCH = 64, // steps of a segment and of its look-ahead
};

// Returns the default number of scale candidates. Short blocks vary more. A diagonal Hessian is not diagonal in the rotated basis, so there is
// error feedback; it needs larger scales than the weights alone, by an amount that varies. With other Hessians trellis_improve() gains more
// than further candidates.
static inline int trellis_default_scales(int n, bool with_importance) {
    return with_importance ? TRELLIS_MAX_SCALES : n == QK_K ? 2 : 3;
}

// A block counts as Gaussian if its error is at most this factor times that of Gaussian weights. Errors of short blocks vary more.
#define TRELLIS_GAUSSIAN_LIMIT(N) ((N) == QK_K ? 1.15f : (N) == 64 ? 1.30f : 1.42f)

// The same with a block-diagonal or full Hessian. Error feedback searches segment by segment, which raises the error, so the limit is larger.
#define TRELLIS_GAUSSIAN_LIMIT_FEEDBACK(N) ((N) == QK_K ? 1.4f : (N) == 64 ? 1.6f : 1.8f)

struct trellis_best {
    float    err;
    uint8_t  d;
    uint16_t states[QK_K]; // of the n/v steps; all zero where d = 0
};

// Input of trellis_encode(), in the order of the path, which is that of the metric's steps.
struct trellis_block {
    const struct ggml_ext_metric * metric; // factorized Hessian (metric.h); NULL: squared error
    int64_t first_step;                    // of the block, in its row
    float   x[QK_K];                       // rotated weights
    float   goal[QK_K];                    // x compensated for the errors of the row's earlier blocks
};

// Finds the states under scale d segment by segment, each compensating for the errors of those before.
static inline __attribute__((always_inline)) void trellis_search_feedback(struct trellis_type t, struct trellis_work * w,
                                                                          const struct trellis_block * in, float d, uint16_t * states) {
    // A state holds earlier symbols, so the end of a segment restricts the start of the next. Each search therefore covers `ahead` more
    // steps, whose states are dropped.
    const int S = in->metric->segment, ahead = S < 16 ? 24 : in->metric->windows ? 16 : S;
    float goal[QK_K], errors[METRIC_MAX_SEGMENT];
    memcpy(goal, in->goal, (size_t) t.n*sizeof(goal[0]));
    for (int s = 0; s < t.n; s += S) {
        const int n = s + S + ahead < t.n ? S + ahead : t.n - s;
        float    z[TRELLIS_MAX_SEARCH];
        uint16_t path[TRELLIS_MAX_SEARCH];
        for (int j = 0; j < n; ++j) {
            z[j] = goal[s + j]*(1.0f/d);
        }
        trellis_search(t, w, z, n, s == 0 ? -1 : states[s/t.v - 1], -1, path);
        memcpy(states + s/t.v, path, (size_t) (S/t.v)*sizeof(path[0]));
        for (int j = 0; j < S; ++j) {
            errors[j] = in->x[s + j] - d*trellis_value(t.v, w, path, j);
        }
        const int64_t step_in_hessian = in->first_step%in->metric->columns + s;
        for (int r = s + S; r < t.n; r += S) {
            metric_add_rows(S, metric_L(in->metric, in->first_step + r) + step_in_hessian*S, S, errors, goal + r);
        }
    }
}

// Returns the largest scale byte whose scale is at most v.
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

// Returns the nearer of the two scale bytes around v, the other if that was tried, -1 if both were. Byte 0 is no scale.
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

// Returns an untried neighbour of a scale byte, first the larger one, or -1.
static inline int trellis_neighbour_scale(int scale_byte, const uint8_t * tried, int n_tried) {
    if (scale_byte < GGML_EXT_E5M3_MAX && memchr(tried, scale_byte + 1, (size_t) n_tried) == NULL) {
        return scale_byte + 1;
    }
    return scale_byte > 1 && memchr(tried, scale_byte - 1, (size_t) n_tried) == NULL ? scale_byte - 1 : -1;
}

// Sum of a[i]*b[i] over a block of n.
static inline __attribute__((always_inline)) float trellis_dot(int n, const float * a, const float * b) {
    ext_f32 sum[2] = {0};
    for (int i = 0; i < n/4; ++i) {
        sum[i%2] += ext_load(a + 4*i)*ext_load(b + 4*i);
    }
    return ext_sum(sum);
}

// Returns the cost of a block's errors with the values d*v; v NULL: zeros. *d_change: the change of d
// that minimizes the cost; may be NULL.
static inline __attribute__((always_inline)) float trellis_cost(int n, const struct trellis_block * in, const float * v, float d, float * d_change) {
    float e[QK_K], r[QK_K], weighted[QK_K], b[QK_K];
    for (int i = 0; i < n; ++i) {
        e[i] = v ? in->x[i]    - d*v[i] : in->x[i];
        r[i] = v ? in->goal[i] - d*v[i] : in->goal[i];
    }
    if (in->metric) {
        metric_add_feedback(in->metric, in->first_step, n, e, r);
    }
    if (d_change) {
        memcpy(b, v, (size_t) n*sizeof(b[0]));
        memcpy(weighted, v, (size_t) n*sizeof(b[0]));
        if (in->metric) {
            metric_add_feedback(in->metric, in->first_step, n, v, b);
            metric_apply_D(in->metric, in->first_step, n, b, weighted);
        }
        const float vv = trellis_dot(n, b, weighted);
        *d_change = vv > 0.0f ? trellis_dot(n, r, weighted)/vv : -d;
    }
    if (in->metric) {
        metric_apply_D(in->metric, in->first_step, n, r, weighted);
    }
    return trellis_dot(n, r, in->metric ? weighted : r);
}

// Searches each window of the block again, with all states outside it fixed. A window's target minimizes the cost, given the errors on both
// sides. New states are kept if they lower the block's cost, measured by the block's Schur complement (metric.h). Alternatives:
// docs/results/encoders.md.
static inline __attribute__((always_inline)) void trellis_improve(struct trellis_type t, struct trellis_work * w,
                                                                  const struct trellis_block * in, struct trellis_best * best) {
    enum { W = METRIC_WINDOW };
    const int     n_groups = GGML_EXT_TRELLIS_STATES >> t.k;
    const float   d = ggml_ext_e5m3_to_float(best->d), inv_d = 1.0f/d;
    const float * schur = metric_schur(in->metric, in->first_step), * inverse = metric_windows(in->metric, in->first_step);
    float e[QK_K], g[QK_K]; // g: schur times the errors
    metric_find_optimum(in->metric, in->first_step, t.n, in->x, in->goal, e);
    for (int i = 0; i < t.n; ++i) {
        e[i] -= d*trellis_value(t.v, w, best->states, i);
    }
    metric_multiply(t.n, schur, e, g);
    for (int s = 0; s + W <= t.n; s += W/2, inverse += W*W) {
        uint16_t * states = best->states + s/t.v, path[W];
        float z[W], change[W], product[W];
        metric_multiply(W, inverse, g + s, z);
        for (int i = 0; i < W; ++i) {
            z[i] = trellis_value(t.v, w, states, i) + z[i]*inv_d;
        }
        trellis_search(t, w, z, W, s == 0 ? -1 : states[-1], s + W == t.n ? -1 : states[W/t.v - 1] & (n_groups - 1), path);
        float sum = 0.0f;
        for (int i = 0; i < W; ++i) {
            change[i] = d*(trellis_value(t.v, w, path, i) - trellis_value(t.v, w, states, i));
        }
        memset(product, 0, sizeof(product));
        metric_add_matrix(W, schur + s*t.n + s, t.n, W, change, product);
        for (int i = 0; i < W; ++i) {
            sum += change[i]*(0.5f*product[i] - g[s + i]);
        }
        if (sum < 0.0f) {
            for (int i = 0; i < W; ++i) {
                change[i] = -change[i];
            }
            const int first = s/W*W; // earlier gradients are not used again
            metric_add_matrix(t.n - first, schur + s*t.n + first, t.n, W, change, g + first);
            memcpy(states, path, (size_t) (W/t.v)*sizeof(path[0]));
        }
    }
}

// Encodes the block under one scale, and keeps the states in *best if they cost least so far. Returns the scale that suits the states of
// this call best; without need_optimum, the given scale. *squared_error: of these states against in->goal, without the Hessian. feed_back:
// search with error feedback; false without a Hessian and for the first estimate.
static inline __attribute__((always_inline)) float trellis_try_scale(struct trellis_type t, struct trellis_work * w,
                                                                     const struct trellis_block * in, int scale_byte,
                                                                     bool feed_back, bool need_optimum, struct trellis_best * best,
                                                                     float * squared_error) {
    const float d = ggml_ext_e5m3_to_float((uint8_t) scale_byte), inv_d = 1.0f/d;
    uint16_t states[QK_K];
    float    v[QK_K], e[QK_K], d_change = 0.0f;
    if (feed_back) {
        trellis_search_feedback(t, w, in, d, states);
    } else {
        for (int i = 0; i < t.n; ++i) {
            v[i] = in->goal[i]*inv_d;
        }
        trellis_search(t, w, v, t.n, -1, -1, states);
    }
    for (int i = 0; i < t.n; ++i) {
        v[i] = trellis_value(t.v, w, states, i);
        e[i] = in->goal[i] - d*v[i];
    }
    *squared_error = trellis_dot(t.n, e, e);
    const float err = trellis_cost(t.n, in, v, d, need_optimum ? &d_change : NULL);
    if (err < best->err) {
        best->err = err;
        best->d   = (uint8_t) scale_byte;
        memcpy(best->states, states, (size_t) (t.n/t.v)*sizeof(states[0]));
    }
    return d + d_change;
}

// Returns the squared error minus TRELLIS_GAUSSIAN_LIMIT_FEEDBACK times the expected error of Gaussian weights; positive: try extra scales.
static inline __attribute__((always_inline)) float trellis_excess(struct trellis_type t, const struct trellis_work * w,
                                                                  const struct trellis_block * in, const struct trellis_best * best) {
    const float d = ggml_ext_e5m3_to_float(best->d);
    float e[QK_K], r[QK_K], z[QK_K];
    for (int i = 0; i < t.n; ++i) {
        z[i] = d*trellis_value(t.v, w, best->states, i);
        e[i] = in->x[i] - z[i];
        r[i] = in->goal[i] - z[i];
    }
    metric_add_feedback(in->metric, in->first_step, t.n, e, r);
    for (int i = 0; i < t.n; ++i) {
        z[i] += r[i];
    }
    return trellis_dot(t.n, r, r) - TRELLIS_GAUSSIAN_LIMIT_FEEDBACK(t.n)*t.nmse*trellis_dot(t.n, z, z);
}

// Tries a scale near the target, then scales next to the optimum of the best states so far, then neighbours of the best scale. Stores the
// scale bytes in tried[] and returns their number, at most n_scales.
static inline __attribute__((always_inline)) int trellis_search_near(struct trellis_type t, struct trellis_work * w,
                                                                     const struct trellis_block * in, float target, int n_scales,
                                                                     uint8_t * tried, struct trellis_best * best) {
    float squared_error;
    int   n_tried = 0, base_byte = 0; // neighbours of base_byte are tried
    for (int i = 0; i < n_scales; ++i) {
        int scale_byte = trellis_next_scale(target, tried, n_tried);
        if (scale_byte < 0 && base_byte > 0) {
            scale_byte = trellis_neighbour_scale(base_byte, tried, n_tried);
        }
        if (scale_byte < 0) {
            break;
        }
        const float optimum = trellis_try_scale(t, w, in, scale_byte, in->metric != NULL, i + 1 < n_scales, best, &squared_error);
        tried[n_tried++] = (uint8_t) scale_byte;
        if (base_byte == 0 || best->d == scale_byte) {
            base_byte = scale_byte;
            target    = optimum;
        }
    }
    return n_tried;
}

// Tries further scales for a block that is not Gaussian: it has few distinct values or an outlier. Without a Hessian, stops when the error
// falls to error_limit.
static inline __attribute__((always_inline)) void trellis_try_extra_scales(struct trellis_type t, struct trellis_work * w,
                                                                           const struct trellis_block * in, float gaussian_scale,
                                                                           float error_limit, uint8_t * tried, int n_tried,
                                                                           struct trellis_best * best) {
    float peak = 0.0f, squared_error;
    for (int i = 0; i < t.n; ++i) {
        peak = fmaxf(peak, fabsf(in->x[i]));
    }
    const float extra[TRELLIS_N_EXTRA] = {1.3f*gaussian_scale, 1.6f*gaussian_scale, 0.75f*gaussian_scale, peak/w->code_top};
    for (int i = 0; i < TRELLIS_N_EXTRA && (in->metric || best->err > error_limit); ++i) {
        const int scale_byte = trellis_next_scale(extra[i], tried, n_tried);
        if (scale_byte > 0) {
            trellis_try_scale(t, w, in, scale_byte, in->metric != NULL, false, best, &squared_error);
            tried[n_tried++] = (uint8_t) scale_byte;
        }
    }
}

// Encodes a block under n_scales scales, then extra ones if its error shows that it is not Gaussian.
static inline __attribute__((always_inline)) void trellis_encode(struct trellis_type t, struct trellis_work * w,
                                                                 const struct trellis_block * in, int n_scales, struct trellis_best * best) {
    uint8_t tried[TRELLIS_MAX_SCALES + TRELLIS_N_EXTRA];
    *best = (struct trellis_best) {.err = trellis_cost(t.n, in, NULL, 0.0f, NULL)}; // d = 0 unless a scale is better
    const float energy = trellis_dot(t.n, in->goal, in->goal), error_limit = TRELLIS_GAUSSIAN_LIMIT(t.n)*t.nmse*energy;
    const float gaussian_scale = sqrtf(energy*(1.0f/t.n))/w->code_rms;
    const bool  has_correlations = in->metric && in->metric->windows, is_diagonal = in->metric && !has_correlations; // the Hessian
    float target = gaussian_scale*(has_correlations ? t.feedback_gain : t.gain), squared_error = 0.0f;
    // with a diagonal, a search without feedback gives a cheap estimate of the scale and of whether the block is Gaussian
    const int   estimate_byte = is_diagonal ? trellis_next_scale(target, tried, 0) : -1;
    if (estimate_byte > 0) {
        target = trellis_try_scale(t, w, in, estimate_byte, false, true, best, &squared_error);
    }
    const int   n_tried = trellis_search_near(t, w, in, target, n_scales, tried, best);
    const float error = is_diagonal ? squared_error : best->err;
    const bool  non_gaussian = has_correlations ? trellis_excess(t, w, in, best) > 0.0f : error > error_limit;
    if (non_gaussian) {
        trellis_try_extra_scales(t, w, in, gaussian_scale, error_limit, tried, n_tried, best);
    }
    if (has_correlations && best->d > 0) {
        trellis_improve(t, w, in, best);
    }
}

// Writes the bytes of a path.
static inline void trellis_pack(int k, int v, int n, const struct trellis_best * best, uint8_t * start, uint8_t * symbols) {
    uint8_t c[QK_K];
    for (int t = 0; t < n/v; ++t) {
        c[t] = (uint8_t) (best->states[t] & ((1 << k) - 1));
    }
    ggml_ext_trellis_pack(k, v, n, c, symbols);
    const int before = best->states[0] >> k;
    *start = 0;
    for (int s = 0; s < TRELLIS_N_STARTS; ++s) { // the inverse of ggml_ext_trellis_start_state()
        if (ggml_ext_trellis_start_state(k, (uint8_t) s) == before) {
            *start = (uint8_t) s;
        }
    }
}

// Encodes all blocks of the rows. put(dst, i, best) stores block i.
static inline __attribute__((always_inline)) void trellis_encode_rows(struct trellis_type t, const float * src, int64_t n_rows,
        int64_t row_blocks, const struct ggml_ext_metric * metric, int n_scales, void * dst,
        void (*put)(void * dst, int64_t i, const struct trellis_best * best)) {
    struct trellis_work * w = trellis_begin(t);
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, t.n);
    while (ext_rows_next(&rows)) {
        struct trellis_block in = {.metric = metric, .first_step = rows.first};
        struct trellis_best  best = {.d = 0xff}; // row validation rejects it
        const bool finite = ext_rows_load(&rows, src, true, in.x, in.goal);
        if (finite) {
            trellis_encode(t, w, &in, n_scales, &best);
        }
        put(dst, rows.block, &best);
        float * errors = metric ? ext_rows_errors(&rows) : NULL;
        const float d = ggml_ext_e5m3_to_float(best.d);
        for (int j = 0; j < t.n && metric; ++j) {
            errors[j] = best.d == 0 || !finite ? in.x[j] : in.x[j] - d*trellis_value(t.v, w, best.states, j);
        }
    }
    ext_rows_end(&rows);
    trellis_end(w);
}

#define GGML_EXT_X(NAME, name, K, V, N, CODE, OFFSET, GAIN, FEEDBACK, UNIT, NMSE)                                         \
    static void put_##name(void * dst, int64_t i, const struct trellis_best * best) {                                     \
        block_##name * b = (block_##name *) dst + i;                                                                      \
        b->d = best->d;                                                                                                   \
        trellis_pack(K, V, N, best, &b->start, b->symbols);                                                               \
    }                                                                                                                     \
    EXT_CLONES                                                                                                            \
    void ggml_ext_encode_##name(const float * src, block_##name * dst, int64_t n_rows, int64_t row_blocks,                \
                                const float * importance, const struct ggml_ext_quantize_params * params) {               \
        const struct trellis_type t = {K, V, N, &ggml_ext_##name##_tables, OFFSET, GAIN, FEEDBACK, UNIT, NMSE};           \
        const int n_scales = params->trellis_passes ? params->trellis_passes                                              \
                                                    : trellis_default_scales(N, importance && !params->metric);           \
        struct ggml_ext_metric * diagonal = NULL;                                                                         \
        if (importance && !params->metric) {                                                                              \
            diagonal = metric_from_importance(GGML_TYPE_##NAME, row_blocks*N, N, importance);                             \
            GGML_ASSERT(diagonal != NULL);                                                                                \
        }                                                                                                                 \
        trellis_encode_rows(t, src, n_rows, row_blocks, diagonal ? diagonal : params->metric, n_scales, dst, put_##name); \
        ggml_ext_metric_free(diagonal);                                                                                   \
    }
GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
