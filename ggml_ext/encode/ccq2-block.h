// Encode a CCQ2 block with or without importances: search all 256 codes for every four weights, refit the scales in closed form (CCQ,
// equation 4), repeat. Sums over weights are float64 in the order of the weights, so that the numpy reference gives the same bytes;
// compiled with -ffp-contract=off.
#pragma once

#include "levels.h"

#include "../types/ccq2.h"

enum { N_CODES = 256, N_GROUPS = 4, GROUP = QK_K/N_GROUPS };

// First guess of a group's scale over its root mean square, number of closed-form refits, and the range of super scales to try around
// the best. An exhaustive search of all scales would lower the squared error of a Gaussian from 0.1053 to 0.1046.
#define FIRST_GUESS 0.0625
enum { N_REFITS = 2, SUPER_STEPS = 2 };

// Weights are clamped to what the largest scale can reach.
#define X_MAX 8e4f

struct codes {
    float v[4][N_CODES], v2[4][N_CODES]; // values of each code, q - 32, and their squares
};

static void make_codes(struct codes * t) {
    for (int b = 0; b < N_CODES; ++b) {
        const int c = CCQ2_ALPHA*b + CCQ2_BETA;
        for (int k = 0; k < 4; ++k) {
            t->v [k][b] = (float) (c >> (9 - 3*k) & 63) - CCQ2_OFFSET;
            t->v2[k][b] = t->v[k][b]*t->v[k][b];
        }
    }
}

struct block {
    float x[QK_K], w[QK_K], wx[QK_K]; // weights, importances, products
    bool  weighted;
};

// norm[b] = sum over k of w[k]*(s[k]*v[k][b])^2
static void fill_norms(const struct codes * t, const float w[4], const float s[4], float norm[N_CODES]) {
    float f[4];
    for (int k = 0; k < 4; ++k) {
        f[k] = s[k]*s[k]*w[k];
    }
    for (int b = 0; b < N_CODES; b += 4) {
        const ext_f32 n = f[0]*ext_load(t->v2[0] + b) + f[1]*ext_load(t->v2[1] + b) + f[2]*ext_load(t->v2[2] + b)
                        + f[3]*ext_load(t->v2[3] + b);
        memcpy(norm + b, &n, sizeof(n));
    }
}

// Return the lane of the least cost; of equals, that of the first code.
static inline __attribute__((always_inline)) int least_lane(int n, const float * cost, const int32_t * code) {
    int lane = 0;
    for (int i = 1; i < n; ++i) {
        if (cost[i] < cost[lane] || (cost[i] == cost[lane] && code[i] < code[lane])) {
            lane = i;
        }
    }
    return lane;
}

// Return the first code b in lo .. hi - 1 with the least norm[b] + sum over k of a[k]*v[k][b], and store that value in *least; lo and hi
// are multiples of four.
static int best_code(const struct codes * t, const float norm[N_CODES], const float a[4], int lo, int hi, float * least) {
    ext_f32 best = {FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX};
    ext_i32 code = {lo, lo, lo, lo}, index = {lo, lo + 1, lo + 2, lo + 3};
    for (int b = lo; b < hi; b += 4, index += 4) {
        const ext_f32 e = ext_load(norm + b) + a[0]*ext_load(t->v[0] + b) + a[1]*ext_load(t->v[1] + b)
                        + a[2]*ext_load(t->v[2] + b) + a[3]*ext_load(t->v[3] + b);
        const ext_i32 less = e < best;
        best = (ext_f32) (((ext_i32) e & less) | ((ext_i32) best & ~less));
        code = (index & less) | (code & ~less);
    }
    const int lane = least_lane(4, (const float *) &best, (const int32_t *) &code);
    *least = best[lane];
    return code[lane];
}

// Limit the search to codes that can beat `error`, the squared error of some code: the error of the first value, which grows with the
// code, must not exceed it. The margins cover rounding. A third of the codes remain on average.
static void window(float x, float w, float s, float error, int * lo, int * hi) {
    const float r = sqrtf(error/w)*1.001f, to_code = 512.0f/CCQ2_ALPHA;
    const float first = ((x - r)/s + CCQ2_OFFSET - 0.1f)*to_code - (float) CCQ2_BETA/CCQ2_ALPHA - 1;
    const float last  = ((x + r)/s + CCQ2_OFFSET + 1.1f)*to_code - (float) CCQ2_BETA/CCQ2_ALPHA + 1;
    *lo = first > 0 ? (first < N_CODES - 4 ? (int) first & ~3 : N_CODES - 4) : 0; // NaN keeps all codes
    *hi = last < N_CODES - 4 ? (last > *lo ? ((int) last | 3) + 1 : *lo + 4) : N_CODES;
}

// Search the codes of least error for 128 weights, half a block, under two group scales. qs may hold a good first guess. Return the
// squared error.
static double search(const struct codes * t, const struct block * in, int half, const float s[2], uint8_t qs[QK_K/8]) {
    const float sk[4] = {s[0], s[0], s[1], s[1]};
    double error = 0;
    float  norm[N_CODES]; // equal for all bytes unless there are importances
    for (int i = 0; i < QK_K/8; ++i) {
        const int j0 = QK_K/2*half + i;
        float w[4], a[4], energy = 0, error_before = 0, least;
        for (int k = 0; k < 4; ++k) {
            const int   j = j0 + 32*k;
            const float e = in->x[j] - sk[k]*t->v[k][qs[i]];
            w[k]    = in->w[j];
            a[k]    = -2*sk[k]*in->wx[j];
            energy += in->wx[j]*in->x[j];
            error_before += w[k]*e*e;
        }
        if (in->weighted || i == 0) {
            fill_norms(t, w, sk, norm);
        }
        int lo, hi;
        window(in->x[j0], w[0], sk[0], error_before + 1e-5f*energy, &lo, &hi);
        qs[i]  = (uint8_t) best_code(t, norm, a, lo, hi, &least);
        error += (double) (least + energy);
    }
    return error;
}

static void get_scales(const block_ccq2 * x, float s[N_GROUPS]) {
    const float d = ggml_ext_e5m3_to_float(x->d);
    for (int g = 0; g < N_GROUPS; ++g) {
        s[g] = d*(float) ggml_ext_ccq2_scale(x->scales >> 2*g & 3);
    }
}

// Set the super scale d and the group scales nearest to `fit`. Return the sum of den*(s - fit)^2.
static double round_groups(const double fit[N_GROUPS], const double den[N_GROUPS], int d, block_ccq2 * x) {
    const double scale = (double) ggml_ext_e5m3_to_float((uint8_t) d);
    double sum = 0;
    x->d = (uint8_t) d;
    x->scales = 0;
    for (int g = 0; g < N_GROUPS; ++g) {
        double best = INFINITY;
        int    index = 0;
        for (int m = 0; m < 4; ++m) {
            const double e = scale*ggml_ext_ccq2_scale(m) - fit[g];
            if (e*e < best) {
                best  = e*e;
                index = m;
            }
        }
        sum += den[g]*best;
        x->scales |= (uint8_t) (index << 2*g);
    }
    return sum;
}

enum { D_END = 0xf8 }; // above, E5M3 is Inf or NaN

// First of N_CANDIDATES super scales for groups whose largest scale is `top`. That scale has one of the multipliers 5 to 11, so d is
// between top/11 and top/5, plus an E5M3 step (1/8) on each side: eight steps per octave, log2(12.5/4.4) octaves.
enum { N_CANDIDATES = 14 };
static int first_super_scale(double top) {
    int lo = 0, hi = D_END - 1;
    while (lo < hi) { // first d >= top/12.5
        const int mid = (lo + hi)/2;
        if ((double) ggml_ext_e5m3_to_float((uint8_t) mid)*12.5 < top) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

// Set the super scale and group scales nearest to `fit`.
static void round_scales(const double fit[N_GROUPS], const double den[N_GROUPS], block_ccq2 * x) {
    double top = 0, least = INFINITY;
    for (int g = 0; g < N_GROUPS; ++g) {
        top = fit[g] > top ? fit[g] : top;
    }
    const int first = first_super_scale(top);
    for (int d = first; d < first + N_CANDIDATES && d < D_END; ++d) {
        block_ccq2   y;
        const double sum = round_groups(fit, den, d, &y);
        if (sum < least) {
            least     = sum;
            x->d      = y.d;
            x->scales = y.scales;
        }
    }
}

struct best {
    block_ccq2 x;
    double     error[2]; // of the halves
};

// Search codes under the scales of x, in the given halves, and keep x if it is better than the best.
static void consider(const struct codes * t, const struct block * in, block_ccq2 * x, bool first, bool second,
                     struct best * best) {
    if (x->d == 0) {
        return; // the zero block, which was the initial best
    }
    float s[N_GROUPS];
    get_scales(x, s);
    double error[2] = {best->error[0], best->error[1]};
    for (int half = first ? 0 : 1; half < (second ? 2 : 1); ++half) {
        error[half] = search(t, in, half, s + 2*half, x->qs + QK_K/8*half);
    }
    if (error[0] + error[1] < best->error[0] + best->error[1]) {
        best->x        = *x;
        best->error[0] = error[0];
        best->error[1] = error[1];
    }
}

// Load a block. Return false if a weight is NaN or Inf. Add a thousandth of the mean importance, so that columns no token used keep
// their values.
static bool load(const float * x, const float * importance, struct block * in) {
    double sum = 0;
    for (int j = 0; importance && j < QK_K; ++j) {
        sum += (double) importance[j];
    }
    in->weighted = sum > 0 && sum <= (double) FLT_MAX;
    const float floor = (float) (sum*(1.0/QK_K/1024));
    bool finite = true;
    for (int j = 0; j < QK_K; ++j) {
        finite &= fabsf(x[j]) <= FLT_MAX;
        in->x[j]  = x[j] > X_MAX ? X_MAX : x[j] < -X_MAX ? -X_MAX : x[j];
        in->w[j]  = in->weighted ? importance[j] + floor : 1.0f;
        in->wx[j] = in->w[j]*in->x[j];
    }
    return finite;
}

static void encode_block(const struct codes * t, const float * src, const float * importance, block_ccq2 * dst) {
    struct block in;
    struct best  best = {0}; // the zero block
    if (!load(src, importance, &in)) {
        memset(dst, 0, sizeof(*dst));
        dst->d = 0xff; // refused by row validation
        return;
    }
    double fit[N_GROUPS], den[N_GROUPS] = {0}, num[N_GROUPS] = {0};
    for (int j = 0; j < QK_K; ++j) {
        num[j/GROUP] += (double) in.wx[j]*(double) in.x[j];
        den[j/GROUP] += (double) in.w[j];
    }
    for (int g = 0; g < N_GROUPS; ++g) {
        best.error[g/2] += num[g];
        fit[g] = FIRST_GUESS*sqrt(num[g]/den[g]);
    }
    block_ccq2 x = {0};
    for (int refit = 0; refit <= N_REFITS; ++refit) {
        round_scales(fit, den, &x);
        consider(t, &in, &x, true, true, &best);
        memset(num, 0, sizeof(num));
        memset(den, 0, sizeof(den));
        for (int j = 0; j < QK_K; ++j) {
            const int b = x.qs[32*(j/128) + j%32], k = j%128/32;
            num[j/GROUP] += (double) in.wx[j]*(double) t->v [k][b];
            den[j/GROUP] += (double) in.w [j]*(double) t->v2[k][b];
        }
        for (int g = 0; g < N_GROUPS; ++g) {
            fit[g] = num[g] > 0 && den[g] > 0 ? num[g]/den[g] : 0;
        }
    }
    // try other super scales with the group scales nearest to the last fit, then each group scale one step up or down
    const int middle = best.x.d;
    for (int d = middle - SUPER_STEPS; d <= middle + SUPER_STEPS; ++d) {
        if (d > 0 && d < D_END && d != middle) {
            x = best.x;
            round_groups(fit, den, d, &x);
            consider(t, &in, &x, true, true, &best);
        }
    }
    for (int g = 0; g < N_GROUPS; ++g) {
        const int index = best.x.scales >> 2*g & 3;
        for (int m = index - 1; m <= index + 1; m += 2) {
            if (m >= 0 && m < 4) {
                x = best.x;
                x.scales = (uint8_t) ((x.scales & ~(3 << 2*g)) | m << 2*g);
                consider(t, &in, &x, g < 2, g >= 2, &best);
            }
        }
    }
    *dst = best.x;
}
