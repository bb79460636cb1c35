// Codebooks: of a block, or one for many blocks under a scale of each.
#include "variant_search.h"

enum { MAX_CLUSTERS = 32 };

struct prefix {
    double * w, * wx; // sums over the samples before
};

// best[i] of a layer: the largest sum of sum_wx^2/sum_w over clusters of samples 0..i-1; start[i]: where the last of them begins.
static void search_starts(const struct prefix * p, const double * below, double * best, int32_t * start, int lo, int hi,
                          int first, int last) {
    if (lo > hi) {
        return;
    }
    const int i = (lo + hi)/2, end = last < i ? last : i;
    double top = -1;
    int    at  = first;
    for (int j = first; j <= end; ++j) {
        const double w = p->w[i] - p->w[j], wx = p->wx[i] - p->wx[j], v = below[j] + (w > 0 ? wx*wx/w : 0);
        if (v > top) {
            top = v;
            at  = j;
        }
    }
    best[i]  = top;
    start[i] = at;
    search_starts(p, below, best, start, lo, i - 1, first, at);
    search_starts(p, below, best, start, i + 1, hi, at, last);
}

// The best k clusters of n samples in ascending order, by dynamic programming: centroids in ascending order. 1 without memory.
int cluster(int n, const double * x, const double * w, int k, double * c) {
    double  * sums   = malloc(sizeof(double)*4*(size_t) (n + 1));
    int32_t * starts = malloc(sizeof(int32_t)*(size_t) k*(size_t) (n + 1));
    if (sums == NULL || starts == NULL) {
        free(sums);
        free(starts);
        return 1;
    }
    const struct prefix p = {sums, sums + n + 1};
    double * below = sums + 2*(n + 1), * best = sums + 3*(n + 1);
    p.w[0] = p.wx[0] = 0;
    for (int i = 0; i < n; ++i) {
        p.w [i + 1] = p.w [i] + w[i];
        p.wx[i + 1] = p.wx[i] + w[i]*x[i];
    }
    for (int i = 0; i <= n; ++i) {
        below[i]  = p.w[i] > 0 ? p.wx[i]*p.wx[i]/p.w[i] : 0;
        starts[i] = 0;
    }
    for (int layer = 1; layer < k; ++layer) {
        search_starts(&p, below, best, starts + (size_t) layer*(n + 1), 0, n, 0, n);
        double * t = below;
        below = best;
        best  = t;
    }
    for (int layer = k - 1, end = n; layer >= 0; --layer) {
        const int from = starts[(size_t) layer*(n + 1) + end];
        const double total = p.w[end] - p.w[from];
        c[layer] = total > 0 ? (p.wx[end] - p.wx[from])/total : x[from < n ? from : n - 1];
        end = from;
    }
    free(sums);
    free(starts);
    return 0;
}

static int nearest_entry(const float * level, int k, float v) {
    int lo = 0;
    for (int step = MAX_CLUSTERS/2; step > 0; step /= 2) { // the last entry whose lower middle is not above v
        if (lo + step < k && v >= 0.5f*(level[lo + step - 1] + level[lo + step])) {
            lo += step;
        }
    }
    return lo;
}

struct sample {
    float x, w;
};

static int by_value(const void * a, const void * b) {
    const float x = ((const struct sample *) a)->x, y = ((const struct sample *) b)->x;
    return (x > y) - (x < y);
}

// Values of blocks of n <= 256 with codebooks of their own of k entries. top: what integers go up to, entries being a half times
// an integer; 0: entries as they are. 1 without memory.
int encode_codebooks(int n, int k, int top, int64_t n_blocks, int64_t row_blocks, const float * x, const float * w, float * out) {
    for (int64_t b = 0; b < n_blocks; ++b) {
        struct sample s[256];
        double xs[256], ws[256], c[MAX_CLUSTERS], largest = 0;
        float  level[MAX_CLUSTERS];
        for (int i = 0; i < n; ++i) {
            s[i] = (struct sample) {x[b*n + i], w ? w[b%row_blocks*n + i] : 1};
        }
        qsort(s, n, sizeof(s[0]), by_value);
        for (int i = 0; i < n; ++i) {
            xs[i] = s[i].x;
            ws[i] = s[i].w;
        }
        if (cluster(n, xs, ws, k, c)) {
            return 1;
        }
        for (int i = 0; i < k; ++i) {
            largest = fabs(c[i]) > largest ? fabs(c[i]) : largest;
        }
        const float d = top > 0 ? half((float) (largest/top)) : 1;
        for (int i = 0; i < k; ++i) {
            level[i] = top == 0 ? (float) c[i] : d > 0 ? d*rintf(fminf(fmaxf((float) c[i]/d, (float) -top), (float) top)) : 0;
        }
        for (int i = 0; i < n; ++i) {
            out[b*n + i] = level[nearest_entry(level, k, x[b*n + i])];
        }
    }
    return 0;
}

// Sums of a block under entries times d.
static struct sums scaled_sums(int n, int k, const float * level, const float * x, const float * w, float d) {
    struct sums f = {0, 0};
    const float by = 1/d;
    for (int i = 0; i < n; ++i) {
        const float q = level[nearest_entry(level, k, x[i]*by)], t = w ? w[i]*q : q;
        f.xq += t*x[i];
        f.qq += t*q;
    }
    return f;
}

// Entries nearest to x/d for n_blocks of n weights, and d, a half: of several starts, `usual` among them, the one of least error,
// and refits of it. usual: 0 takes d = 1.
void encode_scaled(int n, int k, const float * level, float usual, int64_t n_blocks, int64_t row_blocks, const float * x,
                   const float * w, float * scales, float * out) {
    enum { N = 6, REFITS = 4 };
    float spread = 0;
    for (int i = 0; i < k; ++i) {
        spread += level[i]*level[i]/(float) k;
    }
    const float last = fmaxf(fabsf(level[0]), fabsf(level[k - 1]));
    for (int64_t b = 0; b < n_blocks; ++b) {
        const float * y = x + b*n, * u = w ? w + b%row_blocks*n : NULL;
        float energy = 0, top = 0, best = 0, best_d = usual > 0 ? 0 : 1;
        for (int i = 0; i < n; ++i) {
            energy += y[i]*y[i];
            top = fmaxf(top, fabsf(y[i]));
        }
        if (usual > 0 && energy > 0) { // from the root mean square, where entries lie farther out than weights, to the largest
            const float from = 0.92f*sqrtf(energy/(float) n/spread), to = fmaxf(1.5f*from, top/last);
            for (int i = 0; i <= N; ++i) {
                const float d = i < N ? from*powf(to/from, (float) i/(N - 1)) : usual;
                const struct sums found = scaled_sums(n, k, level, y, u, d);
                const float s = half(found.qq > 0 ? found.xq/found.qq : 0);
                if (gain(found, s) > best) {
                    best   = gain(found, s);
                    best_d = s;
                }
            }
            for (int i = 0; i < REFITS && best_d > 0; ++i) {
                const struct sums found = scaled_sums(n, k, level, y, u, best_d);
                const float s = half(found.qq > 0 ? found.xq/found.qq : 0);
                if (!(gain(found, s) > best)) {
                    break;
                }
                best   = gain(found, s);
                best_d = s;
            }
        }
        scales[b] = best_d;
        for (int i = 0; i < n; ++i) {
            out[b*n + i] = best_d > 0 ? best_d*level[nearest_entry(level, k, y[i]/best_d)] : 0;
        }
    }
}
