// Encoder of CCQ2. Without a factorized Hessian (metric.h), ccq2-block.h encodes each block on its own. With one, this file searches codes
// and scales by coordinate descent.
#include "ccq2-block.h"

// Weights are in the order of steps (metric.h). The code of weights 4*p .. 4*p + 3 is called byte p here; it is stored in
// qs[32*(p%2) + p/2]. Its first two weights belong to group 2*(p%2), the others to group 2*(p%2) + 1.
enum { N_BYTES = QK_K/4, BYTE_SWEEPS = 4, N_ROUNDS = 2 };

struct products {
    float v[10][N_CODES]; // v[i][b]: value k times value l of code b, where pairs[i] is (k, l)
};
static const uint8_t pairs[10][2] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {1, 1}, {1, 2}, {1, 3}, {2, 2}, {2, 3}, {3, 3}};

static void byte_scales(const float s[N_GROUPS], int p, float sk[4]) {
    for (int k = 0; k < 4; ++k) {
        sk[k] = s[2*(p%2) + k/2];
    }
}

// norm[b] = v^T A v, where v are the four values of code b times their scales sk. a: A, four rows `stride` apart.
static inline __attribute__((always_inline)) void fill_quadratic_norms(const struct products * t, const float * a, int stride, const float sk[4],
                                                                       float norm[N_CODES]) {
    float f[10];
    for (int i = 0; i < 10; ++i) {
        const int k = pairs[i][0], l = pairs[i][1];
        f[i] = (l > k ? 2.0f : 1.0f)*(sk[k]*sk[l]*a[k*stride + l]);
    }
    for (int b = 0; b < N_CODES; ++b) {
        float sum = f[0]*t->v[0][b];
        for (int i = 1; i < 10; ++i) {
            sum += f[i]*t->v[i][b];
        }
        norm[b] = sum;
    }
}

typedef float   f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

// best_code() over all codes, eight at a time.
static inline __attribute__((always_inline)) int best_of_all_codes(const struct codes * t, const float norm[N_CODES], const float a[4]) {
    f32x8 best = {FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX};
    i32x8 code = {0}, index = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int b = 0; b < N_CODES; b += 8, index += 8) {
        f32x8 e, v;
        memcpy(&e, norm + b, sizeof(e));
        for (int k = 0; k < 4; ++k) {
            memcpy(&v, t->v[k] + b, sizeof(v));
            e += a[k]*v;
        }
        const i32x8 less = e < best;
        best = (f32x8) (((i32x8) e & less) | ((i32x8) best & ~less));
        code = (index & less) | (code & ~less);
    }
    const int lane = least_lane(8, (const float *) &best, (const int32_t *) &code);
    return code[lane];
}

static inline __attribute__((always_inline)) void fill_all_norms(const struct products * t, int n, const float * H, int stride,
                                                                 const float s[N_GROUPS], float norms[][N_CODES]) {
    for (int p = 0; p < n; ++p) {
        float sk[4];
        byte_scales(s, p, sk);
        fill_quadratic_norms(t, H + 4*p*stride + 4*p, stride, sk, norms[p]);
    }
}

// Set each of n bytes in turn to the code of least cost, until nothing changes or BYTE_SWEEPS sweeps are done.
// v: the decoded weights; is_initial: v are the goals instead, and the first sweep sets every byte. g = H (optimum - v), updated with
// each change. norms: of fill_all_norms().
static inline __attribute__((always_inline)) void descend_bytes(const struct codes * t, int n, const float * H, int stride,
                                                                const float s[N_GROUPS], float norms[][N_CODES], bool is_initial,
                                                                uint8_t * code, float * v, float * g) {
    bool changed = true;
    for (int sweep = 0; sweep < BYTE_SWEEPS && changed; ++sweep) {
        changed = false;
        for (int p = 0; p < n; ++p) {
            const float * H_p = H + 4*p*stride + 4*p;
            float sk[4], a[4];
            byte_scales(s, p, sk);
            for (int k = 0; k < 4; ++k) {
                float gradient = g[4*p + k];
                for (int l = 0; l < 4; ++l) {
                    gradient += H_p[k*stride + l]*v[4*p + l];
                }
                a[k] = -2*sk[k]*gradient;
            }
            const int best = best_of_all_codes(t, norms[p], a);
            if (best != code[p] || (is_initial && sweep == 0)) {
                for (int k = 0; k < 4; ++k) {
                    const float value = sk[k]*t->v[k][best], delta = value - v[4*p + k];
                    for (int j = 0; j < 4*n; ++j) {
                        g[j] -= H[(4*p + k)*stride + j]*delta;
                    }
                    v[4*p + k] = value;
                }
                code[p] = (uint8_t) best;
                changed = true;
            }
        }
    }
}

// Choose first codes: segment by segment with error feedback. The values of a segment start at its goal.
static inline __attribute__((always_inline)) void init_bytes(const struct codes * t, const struct products * products,
                                                             const struct ext_levels_block * in, const float s[N_GROUPS],
                                                             uint8_t code[N_BYTES], float v[QK_K]) {
    const struct ggml_ext_metric * m = in->metric;
    const int S = m->segment;
    float errors[QK_K];
    memcpy(v, in->goal, QK_K*sizeof(v[0]));
    for (int f = 0; f < QK_K; f += S) {
        const float * D = metric_D(m, in->first + f);
        float g[METRIC_MAX_SEGMENT] = {0}, norms[METRIC_MAX_SEGMENT/4][N_CODES];
        metric_add_rows(S, metric_L(m, in->first + f) + in->first%m->columns*S, f, errors, v + f);
        fill_all_norms(products, S/4, D, S, s, norms);
        descend_bytes(t, S/4, D, S, s, norms, true, code + f/4, v + f, g);
        for (int i = f; i < f + S; ++i) {
            errors[i] = in->x[i] - v[i];
        }
    }
}

// Fit the scales under fixed codes q: the optimum `fit` and its quadratic form a.
static inline __attribute__((always_inline)) void fit_groups(const float * B, const float B_opt[QK_K], const float q[QK_K],
                                                             double a[N_GROUPS][N_GROUPS], double fit[N_GROUPS]) {
    double b[N_GROUPS] = {0}, c[N_GROUPS][N_GROUPS];
    float  sums[N_GROUPS][QK_K] = {{0}};
    for (int j = 0; j < QK_K; ++j) {
        float * sum = sums[j%8/2];
        for (int i = 0; i < QK_K; ++i) {
            sum[i] += B[j*QK_K + i]*q[j];
        }
    }
    memset(a, 0, sizeof(double)*N_GROUPS*N_GROUPS);
    for (int i = 0; i < QK_K; ++i) {
        for (int g = 0; g < N_GROUPS; ++g) {
            a[i%8/2][g] += (double) q[i]*(double) sums[g][i];
        }
        b[i%8/2] += (double) q[i]*(double) B_opt[i];
    }
    memcpy(c, a, sizeof(c));
    ext_solve(N_GROUPS, &c[0][0], b, (const float[N_GROUPS]) {0}, fit);
}

// Round `fit` to the super scale and group scales of least cost. For each super scale, start at `fit` itself and set each group in turn
// to the stored scale of least cost, three times. x->d = 0 if all scales are zero.
static void round_groups_under_hessian(double a[N_GROUPS][N_GROUPS], const double fit[N_GROUPS], block_ccq2 * x) {
    double top = 0, least = INFINITY;
    for (int g = 0; g < N_GROUPS; ++g) {
        top = fit[g] > top ? fit[g] : top;
    }
    const int first = first_super_scale(top);
    x->d = 0;
    for (int d = first; d < first + N_CANDIDATES && d < D_END; ++d) {
        const double scale = (double) ggml_ext_e5m3_to_float((uint8_t) d);
        double  off[N_GROUPS] = {0}, cost = 0; // off: the current scales minus fit; they cost off^T a off
        uint8_t scales = 0;
        for (int sweep = 0; sweep < 3; ++sweep) {
            for (int g = 0; g < N_GROUPS; ++g) {
                double center = 0, best = INFINITY; // center: the off[g] of least cost, given the other groups
                for (int h = 0; h < N_GROUPS; ++h) {
                    center -= h != g ? a[g][h]*off[h] : 0;
                }
                center = a[g][g] > 0 ? center/a[g][g] : 0;
                for (int m = 0; m < 4; ++m) {
                    const double o = scale*ggml_ext_ccq2_scale(m) - fit[g], e = o - center;
                    if (e*e < best) {
                        best   = e*e;
                        off[g] = o;
                        scales = (uint8_t) ((scales & ~(3 << 2*g)) | m << 2*g);
                    }
                }
            }
        }
        for (int g = 0; g < N_GROUPS; ++g) {
            for (int h = 0; h < N_GROUPS; ++h) {
                cost += off[g]*a[g][h]*off[h];
            }
        }
        if (cost < least) {
            least     = cost;
            x->d      = (uint8_t) d;
            x->scales = scales;
        }
    }
}

// Encode the current block. encode_block() gives the first scales, with the diagonal of the Hessian as importances, and init_bytes() the
// first codes. Each round then descends over the codes and refits the scales. Keep the best block in *dst and its weights in `decoded`.
static inline __attribute__((always_inline)) void encode_block_under_hessian(const struct codes * t, const struct products * products,
                                                                             struct ext_levels_block * in, block_ccq2 * dst,
                                                                             float decoded[QK_K]) {
    metric_find_optimum(in->metric, in->first, QK_K, in->x, in->goal, in->optimum);
    const float * B = metric_schur(in->metric, in->first);
    float   B_opt[QK_K], x_by_position[QK_K], weight[QK_K], v[QK_K], e[QK_K], g[QK_K], norms[N_BYTES][N_CODES], s[N_GROUPS];
    uint8_t code[N_BYTES];
    metric_multiply(QK_K, B, in->optimum, B_opt);
    float least = ext_dot(in->optimum, B_opt); // of the zero block
    for (int i = 0; i < QK_K; ++i) {
        x_by_position[ggml_ext_trellis_position(QK_K, i)] = in->optimum[i];
        weight[ggml_ext_trellis_position(QK_K, i)]      = B[i*QK_K + i];
    }
    block_ccq2 x;
    encode_block(t, x_by_position, weight, &x);
    memset(dst, 0, sizeof(*dst));
    for (int round = 0; round < N_ROUNDS && x.d > 0; ++round) {
        get_scales(&x, s);
        if (round == 0) {
            init_bytes(t, products, in, s, code, v);
        }
        fill_all_norms(products, N_BYTES, B, QK_K, s, norms);
        for (int i = 0; i < QK_K; ++i) {
            v[i] = s[i%8/2]*t->v[i%4][code[i/4]];
            e[i] = in->optimum[i] - v[i];
        }
        metric_multiply(QK_K, B, e, g);
        descend_bytes(t, N_BYTES, B, QK_K, s, norms, false, code, v, g);
        float q[QK_K];
        for (int i = 0; i < QK_K; ++i) {
            e[i] = in->optimum[i] - v[i];
            q[i] = t->v[i%4][code[i/4]];
        }
        const float cost = ext_dot(e, g);
        if (cost < least) {
            least = cost;
            memcpy(decoded, v, sizeof(v));
            for (int p = 0; p < N_BYTES; ++p) {
                x.qs[32*(p%2) + p/2] = code[p];
            }
            *dst = x;
        }
        double a[N_GROUPS][N_GROUPS], fit[N_GROUPS];
        fit_groups(B, B_opt, q, a, fit);
        round_groups_under_hessian(a, fit, &x);
    }
}

EXT_CLONES
static void encode_rows_under_hessian(const float * src, block_ccq2 * dst, int64_t n_rows, int64_t row_blocks,
                                      const struct ggml_ext_metric * metric) {
    struct codes    t;
    struct products products;
    make_codes(&t);
    for (int i = 0; i < 10*N_CODES; ++i) {
        const int b = i%N_CODES;
        products.v[i/N_CODES][b] = t.v[pairs[i/N_CODES][0]][b]*t.v[pairs[i/N_CODES][1]][b];
    }
    struct ext_rows rows = ext_rows_begin(metric, n_rows, row_blocks, QK_K);
    while (ext_rows_next(&rows)) {
        struct ext_levels_block in = {.metric = metric, .first = rows.first};
        block_ccq2 * x = &dst[rows.block];
        float v[QK_K] = {0};
        if (ext_rows_load(&rows, src, false, in.x, in.goal)) {
            encode_block_under_hessian(&t, &products, &in, x, v);
        } else {
            memset(x, 0, sizeof(*x));
            x->d = 0xff; // refused by row validation
        }
        float * errors = ext_rows_errors(&rows);
        for (int i = 0; i < QK_K; ++i) {
            errors[i] = in.x[i] - v[i];
        }
    }
    ext_rows_end(&rows);
}

void ggml_ext_encode_ccq2(const float * src, block_ccq2 * dst, int64_t n_rows, int64_t row_blocks, const float * importance,
                          const struct ggml_ext_quantize_params * params) {
    if (params->metric) {
        encode_rows_under_hessian(src, dst, n_rows, row_blocks, params->metric);
        return;
    }
    struct codes t;
    make_codes(&t);
    for (int64_t ib = 0; ib < n_rows*row_blocks; ++ib) {
        encode_block(&t, src + ib*QK_K, importance ? importance + ib%row_blocks*QK_K : NULL, &dst[ib]);
    }
}
