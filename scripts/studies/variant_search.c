// Inner searches of variants.py: levels in steps of equal size under scales and a zero point, codes of a convolutional code,
// codebooks. Weights of the squared error are importances, or for rotated weights a matrix; NULL where all count alike.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HALF_MAX 65504.0f
// Sweeps, rounds and refits as in encode/levels.h and itq3_s.c.
enum { MAX_SPAN = 512, MAX_GROUPS = MAX_SPAN/16, MAX_SWEEPS = 4, ROUNDS = 3, N_REFITS = 4 };

static float half(float x) {
    return (float) (_Float16) (x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x);
}

// --- eight levels s[g]*(q - z[p]): g counts groups of weights with one scale, p the parts of a span that share a zero point ---

// As in encode/itq3_s.c.
static const float start_scales[] = {0.46f, 0.50f, 0.54f, 0.58f, 0.62f, 0.66f, 0.72f};
static const float start_shifts[] = {-0.4f, -0.2f, 0.0f, 0.2f, 0.4f};
enum { N_STARTS = 7, N_SHIFTS = 5 };

struct levels {
    float s[MAX_GROUPS], z[MAX_GROUPS];
};

static inline float nearest(float x, float s, float z) {
    const float t = s != 0 ? x/s + z : 0;
    return floorf((t < 0 ? 0 : t > 7 ? 7 : t) + 0.5f);
}

static float group_error(const float * x, int n, float s, float z) {
    float err = 0;
    for (int i = 0; i < n; ++i) {
        const float e = x[i] - s*(nearest(x[i], s, z) - z);
        err += e*e;
    }
    return err;
}

static float part_error(const float * x, int n, int group, const float * s, float z) {
    float err = 0;
    for (int g = 0; g < n/group; ++g) {
        err += group_error(x + g*group, group, s[g], z);
    }
    return err;
}

// Scales, and where `fit_z` the zero point, of least squared error for the codes that the present ones give.
static void refit_part(const float * x, int n, int group, float * s, float * z, int fit_z) {
    const int n_groups = n/group;
    float c[MAX_GROUPS], cc[MAX_GROUPS], xc[MAX_GROUPS], sum[MAX_GROUPS];
    for (int g = 0; g < n_groups; ++g) {
        float a = 0, b = 0, d = 0, e = 0;
        for (int i = g*group; i < (g + 1)*group; ++i) {
            const float q = nearest(x[i], s[g], *z);
            a += q, b += q*q, d += x[i]*q, e += x[i];
        }
        c[g] = a, cc[g] = b, xc[g] = d, sum[g] = e;
    }
    if (n_groups == 1 && fit_z) {
        const double det = (double) n*cc[0] - (double) c[0]*c[0];
        if (det > 0) {
            const double a = ((double) n*xc[0] - (double) c[0]*sum[0])/det, b = (sum[0] - a*c[0])/n;
            if (a > 0) {
                s[0] = (float) a;
                *z   = (float) (-b/a);
            }
        }
        return;
    }
    for (int step = 0; step < 3; ++step) {
        float above = 0, below = 0;
        for (int g = 0; g < n_groups; ++g) {
            const float norm = cc[g] - 2**z*c[g] + *z**z*group, to = norm > 0 ? (xc[g] - *z*sum[g])/norm : 0;
            s[g] = to > 0 ? to : s[g];
            above += s[g]*(s[g]*c[g] - sum[g]);
            below += s[g]*s[g]*group;
        }
        if (fit_z && below > 0) {
            *z = above/below;
        }
    }
}

// Scales and zero point of a part of n weights by the squared error, as they are stored.
static void fit_part(const float * x, int n, int group, float * s, float * z) {
    const int n_groups = n/group;
    float sigma[MAX_GROUPS], mean = 0, energy = 0, best = FLT_MAX;
    for (int g = 0; g < n_groups; ++g) {
        float sum = 0, square = 0;
        for (int i = g*group; i < (g + 1)*group; ++i) {
            sum += x[i], square += x[i]*x[i];
        }
        mean  += sum/n;
        energy += square;
        const float centre = n_groups == 1 ? sum/n : 0;
        sigma[g] = sqrtf(square/group - centre*centre > 0 ? square/group - centre*centre : 0);
    }
    memset(s, 0, n_groups*sizeof(*s));
    *z = 3.5f;
    if (!(energy > 0)) {
        return;
    }
    for (int start = 0; start < N_STARTS*N_SHIFTS; ++start) {
        float t[MAX_GROUPS], y = 3.5f + start_shifts[start/N_STARTS];
        for (int g = 0; g < n_groups; ++g) {
            t[g] = start_scales[start%N_STARTS]*sigma[g];
        }
        y -= n_groups == 1 && t[0] > 0 ? mean/t[0] : 0;
        for (int i = 0; i < N_REFITS; ++i) {
            refit_part(x, n, group, t, &y, 1);
        }
        y = half(y);
        for (int g = 0; g < n_groups; ++g) {
            t[g] = half(t[g]);
        }
        const float err = part_error(x, n, group, t, y);
        if (err < best) {
            best = err;
            *z   = y;
            memcpy(s, t, n_groups*sizeof(*s));
        }
    }
    for (int g = 0; g < n_groups && n_groups > 1; ++g) { // groups may want other starts than their part
        float least = group_error(x + g*group, group, s[g], *z);
        for (int start = 0; start < N_STARTS; ++start) {
            float t = start_scales[start]*sigma[g], y = *z;
            for (int i = 0; i < N_REFITS; ++i) {
                refit_part(x + g*group, group, group, &t, &y, 0);
            }
            t = half(t);
            const float err = group_error(x + g*group, group, t, *z);
            if (err < least) {
                least = err;
                s[g]  = t;
            }
        }
    }
}

static void form_times(int n, const float * form, const float * x, float * y) {
    memset(y, 0, n*sizeof(*y));
    for (int j = 0; j < n; ++j) {
        for (int i = 0; i < n; ++i) {
            y[i] += form[(size_t) j*n + i]*x[j];
        }
    }
}

static void fill_values(int n, int part, int group, const struct levels * l, const uint8_t * q, float * v) {
    for (int i = 0; i < n; ++i) {
        v[i] = l->s[i/group]*((float) q[i] - l->z[i/part]);
    }
}

// Scales and zero points of least cost under fixed codes: in turn, each given the others.
static int refit_form(int n, int part, int group, const float * form, const float * pull, const uint8_t * q, struct levels * l) {
    static _Thread_local float by_code[MAX_GROUPS][MAX_SPAN], by_one[MAX_GROUPS][MAX_SPAN];
    const int n_groups = n/group, per_part = part/group;
    double qq[MAX_GROUPS][MAX_GROUPS] = {{0}}, q1[MAX_GROUPS][MAX_GROUPS] = {{0}}, one[MAX_GROUPS][MAX_GROUPS] = {{0}};
    double b[MAX_GROUPS] = {0}, c[MAX_GROUPS] = {0}, s[MAX_GROUPS], z[MAX_GROUPS];
    memset(by_code, 0, sizeof(by_code));
    memset(by_one, 0, sizeof(by_one));
    for (int j = 0; j < n; ++j) {
        float * to = by_code[j/group], * to1 = by_one[j/group];
        const float code = q[j], * row = form + (size_t) j*n;
        for (int i = 0; i < n; ++i) {
            to[i]  += row[i]*code;
            to1[i] += row[i];
        }
    }
    for (int i = 0; i < n; ++i) {
        for (int g = 0; g < n_groups; ++g) {
            qq [g][i/group] += (double) q[i]*by_code[g][i];
            q1 [g][i/group] += by_code[g][i];
            one[g][i/group] += by_one[g][i];
        }
        b[i/group] += (double) q[i]*pull[i];
        c[i/group] += pull[i];
    }
    for (int g = 0; g < n_groups; ++g) {
        s[g] = l->s[g];
        z[g] = l->z[g/per_part];
    }
    for (int step = 0; step < 8; ++step) {
        for (int g = 0; g < n_groups; ++g) {
            double up = b[g] - z[g]*c[g], down = 0;
            for (int h = 0; h < n_groups; ++h) {
                const double a = qq[g][h] - z[h]*q1[g][h] - z[g]*q1[h][g] + z[g]*z[h]*one[g][h];
                if (h == g) {
                    down = a;
                } else {
                    up -= a*s[h];
                }
            }
            s[g] = down > 0 ? up/down : 0;
        }
        for (int p = 0; p < n/part; ++p) {
            double up = 0, down = 0;
            for (int g = p*per_part; g < (p + 1)*per_part; ++g) {
                up -= s[g]*c[g];
                for (int h = 0; h < n_groups; ++h) {
                    up += s[g]*s[h]*q1[h][g];
                    if (h/per_part == p) {
                        down += s[g]*s[h]*one[g][h];
                    } else {
                        up -= s[g]*s[h]*z[h]*one[g][h];
                    }
                }
            }
            for (int g = p*per_part; g < (p + 1)*per_part && down > 0; ++g) {
                z[g] = up/down;
            }
        }
    }
    for (int g = 0; g < n_groups; ++g) {
        if (!(s[g] >= 0 && s[g] <= HALF_MAX && fabs(z[g]) <= HALF_MAX)) {
            return 0;
        }
        l->s[g] = half((float) s[g]);
        l->z[g/per_part] = half((float) z[g]);
    }
    return 1;
}

// Coordinate descent over the codes, as ext_descend() of encode/levels.h: g is the form times x - values and is kept so.
static void descend(int n, int part, int group, const float * form, const struct levels * l, uint8_t * q, float * g) {
    int changed = 1;
    for (int sweep = 0; sweep < MAX_SWEEPS && changed; ++sweep) {
        changed = 0;
        for (int i = 0; i < n; ++i) {
            const float s = l->s[i/group], z = l->z[i/part], * row = form + (size_t) i*n;
            const float best = nearest(s*((float) q[i] - z) + g[i]/row[i], s, z);
            if (s > 0 && best != (float) q[i]) {
                const float by = s*(best - (float) q[i]);
                for (int j = 0; j < n; ++j) {
                    g[j] -= row[j]*by;
                }
                q[i] = (uint8_t) best;
                changed = 1;
            }
        }
    }
}

static void encode_span(int n, int part, int group, const float * form, const float * gains, const float * x, float * out) {
    struct levels l;
    uint8_t q[MAX_SPAN];
    float   v[MAX_SPAN], e[MAX_SPAN] = {0}, g[MAX_SPAN], pull[MAX_SPAN], least = FLT_MAX;
    for (int p = 0; p < n/part; ++p) {
        fit_part(x + p*part, part, group, l.s + p*(part/group), l.z + p);
    }
    if (form == NULL) {
        for (int i = 0; i < n; ++i) {
            q[i] = (uint8_t) nearest(x[i], l.s[i/group], l.z[i/part]);
        }
        fill_values(n, part, group, &l, q, out);
        return;
    }
    memset(out, 0, n*sizeof(*out));
    for (int i = 0; i < n; ++i) { // the errors so far ask something of every next code
        float wish = x[i];
        for (int j = 0; j < i; ++j) {
            wish += gains[(size_t) i*n + j]*e[j];
        }
        const float s = l.s[i/group], z = l.z[i/part];
        q[i] = (uint8_t) nearest(wish, s, z);
        e[i] = x[i] - s*((float) q[i] - z);
    }
    form_times(n, form, x, pull);
    for (int round = 0; round < ROUNDS; ++round) {
        fill_values(n, part, group, &l, q, v);
        for (int i = 0; i < n; ++i) {
            e[i] = x[i] - v[i];
        }
        form_times(n, form, e, g);
        descend(n, part, group, form, &l, q, g);
        fill_values(n, part, group, &l, q, v);
        float cost = 0;
        for (int i = 0; i < n; ++i) {
            cost += (x[i] - v[i])*g[i];
        }
        if (cost < least) {
            least = cost;
            memcpy(out, v, n*sizeof(*out));
        }
        if (!refit_form(n, part, group, form, pull, q, &l)) {
            break;
        }
    }
}

// Values of rotated rows x (n_rows, row_spans*n). forms, gains: of the spans of a row, [row_spans][n][n], or NULL.
void encode_levels(int n, int part, int group, int64_t n_rows, int64_t row_spans, const float * forms, const float * gains,
                   const float * x, float * out) {
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t b = 0; b < row_spans; ++b) {
            const size_t at = (size_t) (r*row_spans + b)*n, m = (size_t) b*n*n;
            encode_span(n, part, group, forms ? forms + m : NULL, gains ? gains + m : NULL, x + at, out + at);
        }
    }
}

// --- convolutional codes: a group of 64 weights is made of vectors, each of which takes a code of a table ---------------------

enum { CCQ_GROUP = 64, CCQ_GROUPS = 4, MAX_CODES = 512, MAX_DIM = 4, MAX_VECTORS = 32 };

struct table {
    int   n_codes, dim;
    float v[MAX_DIM][MAX_CODES], vv[MAX_DIM][MAX_CODES]; // values and their squares
};
struct vectors {
    int n_tables, n_vectors, which[MAX_VECTORS];
    struct table tables[3];
};
struct sums {
    float xq, qq; // sums of importance*x*q and importance*q*q
};

// The best codes under a scale, as values q without it.
static struct sums best_codes(const struct vectors * t, const float * x, const float * w, float s, float * q) {
    struct sums out = {0, 0};
    for (int i = 0, at = 0; i < t->n_vectors; ++i) {
        const struct table * table = t->tables + t->which[i];
        float cost[MAX_CODES] = {0}, least = FLT_MAX;
        for (int k = 0; k < table->dim; ++k) {
            const float a = -2*s*w[at + k]*x[at + k], b = s*s*w[at + k];
            for (int c = 0; c < table->n_codes; ++c) {
                cost[c] += a*table->v[k][c] + b*table->vv[k][c];
            }
        }
        for (int c = 0; c < table->n_codes; ++c) {
            least = cost[c] < least ? cost[c] : least;
        }
        int best = 0;
        while (best < table->n_codes - 1 && cost[best] > least) {
            ++best;
        }
        for (int k = 0; k < table->dim; ++k, ++at) {
            q[at] = table->v[k][best];
            out.xq += w[at]*x[at]*q[at];
            out.qq += w[at]*q[at]*q[at];
        }
    }
    return out;
}

static float gain(struct sums f, float s) { // how far a scale lowers the error
    return s*(2*f.xq - s*f.qq);
}

static float rounded(float v, int mantissa_bits) { // to a mantissa of so many bits, within the exponents of a half
    if (!(v > 0)) {
        return 0;
    }
    int exponent;
    frexpf(v, &exponent);
    exponent = exponent < -13 ? -13 : exponent;
    return ldexpf(rintf(ldexpf(v, mantissa_bits + 1 - exponent)), exponent - mantissa_bits - 1);
}

// The free scale of a group and the codes for it.
static float free_scale(const struct vectors * t, const float * x, const float * w, const float * starts, int n_starts,
                        struct sums * f) {
    float energy = 0, total = 0, q[CCQ_GROUP], best = 0, scale = 0;
    for (int i = 0; i < CCQ_GROUP; ++i) {
        energy += w[i]*x[i]*x[i], total += w[i];
    }
    *f = (struct sums) {0, 0};
    if (!(energy > 0)) {
        return 0;
    }
    for (int i = 0; i < n_starts; ++i) {
        float s = starts[i]*sqrtf(energy/total);
        for (int refit = 0; refit < 2; ++refit) {
            const struct sums found = best_codes(t, x, w, s, q);
            s = found.qq > 0 ? found.xq/found.qq : 0;
            if (gain(found, s) > best) {
                best  = gain(found, s);
                scale = s;
                *f    = found;
            }
        }
    }
    return scale;
}

// 4 groups of 64 under multipliers 0 to 15 of a super scale of one byte; the best of some.
static void encode_multipliers(const struct vectors * t, const float * x, const float * w, const float * starts, int n_starts,
                               float * out) {
    float want[CCQ_GROUPS], q[CCQ_GROUP*CCQ_GROUPS], least = -1;
    struct sums f[CCQ_GROUPS];
    memset(out, 0, sizeof(q));
    for (int g = 0; g < CCQ_GROUPS; ++g) {
        want[g] = free_scale(t, x + 64*g, w + 64*g, starts, n_starts, f + g);
    }
    for (int round = 0; round < 2; ++round) {
        float top = 0, best_d = 0, best = FLT_MAX, s[CCQ_GROUPS];
        for (int g = 0; g < CCQ_GROUPS; ++g) {
            top = want[g] > top ? want[g] : top;
        }
        for (int i = 0; i < 12; ++i) { // E5M3: three bits of mantissa; below 1/15 the largest group is clipped
            const float d = rounded(top/15*(0.92f + 0.06f*(float) i), 3);
            float cost = 0;
            for (int g = 0; g < CCQ_GROUPS && d > 0; ++g) {
                const float m = rintf(want[g]/d), e = want[g] - d*(m > 15 ? 15 : m);
                cost += f[g].qq*e*e;
            }
            if (d > 0 && cost < best) {
                best   = cost;
                best_d = d;
            }
        }
        if (!(best_d > 0)) {
            return;
        }
        float total = 0;
        for (int g = 0; g < CCQ_GROUPS; ++g) {
            const float m = rintf(want[g]/best_d);
            s[g] = best_d*(m > 15 ? 15 : m);
            f[g] = best_codes(t, x + 64*g, w + 64*g, s[g], q + 64*g);
            total += gain(f[g], s[g]);
            want[g] = f[g].qq > 0 ? f[g].xq/f[g].qq : 0;
            want[g] = want[g] > 0 ? want[g] : 0;
        }
        if (total > least) {
            least = total;
            for (int i = 0; i < CCQ_GROUP*CCQ_GROUPS; ++i) {
                out[i] = s[i/CCQ_GROUP]*q[i];
            }
        }
    }
}

// A group of 64 under a scale of `mantissa_bits`: the nearest to the free one and its neighbours.
static void encode_float(const struct vectors * t, const float * x, const float * w, const float * starts, int n_starts,
                         int mantissa_bits, float * out) {
    struct sums f;
    float q[CCQ_GROUP], best = 0;
    const float want = free_scale(t, x, w, starts, n_starts, &f);
    memset(out, 0, sizeof(q));
    for (int step = -1; step <= 1; ++step) {
        const float s = rounded(want*(1 + (float) step/(float) (1 << mantissa_bits)), mantissa_bits);
        f = best_codes(t, x, w, s, q);
        if (gain(f, s) > best) {
            best = gain(f, s);
            for (int i = 0; i < CCQ_GROUP; ++i) {
                out[i] = s*q[i];
            }
        }
    }
}

// Values of n_blocks of 256. tables: n_tables of values [n_codes][dim], one after the other; which: tables of the vectors of 64
// weights. mantissa_bits: of the scale of each group, or 0 for multipliers of a super scale. w: importances of a row of
// row_blocks blocks, or NULL.
int encode_vectors(int n_tables, const int32_t * n_codes, const int32_t * dims, const float * tables, int n_vectors,
                   const int32_t * which, int mantissa_bits, const float * starts, int n_starts, int64_t n_blocks,
                   int64_t row_blocks, const float * x, const float * w, float * out) {
    struct vectors * t = calloc(1, sizeof(*t));
    if (t == NULL || n_tables > 3 || n_vectors > MAX_VECTORS) {
        free(t);
        return 1;
    }
    t->n_tables  = n_tables;
    t->n_vectors = n_vectors;
    for (int i = 0; i < n_vectors; ++i) {
        t->which[i] = which[i];
    }
    for (int i = 0; i < n_tables; ++i) {
        struct table * table = t->tables + i;
        table->n_codes = n_codes[i];
        table->dim     = dims[i];
        for (int j = 0; j < n_codes[i]*dims[i]; ++j) {
            const float v = *tables++;
            table->v [j%dims[i]][j/dims[i]] = v;
            table->vv[j%dims[i]][j/dims[i]] = v*v;
        }
    }
    float ones[256];
    for (int i = 0; i < 256; ++i) {
        ones[i] = 1;
    }
    for (int64_t b = 0; b < n_blocks; ++b) {
        const float * weights = w ? w + b%row_blocks*256 : ones;
        if (mantissa_bits == 0) {
            encode_multipliers(t, x + 256*b, weights, starts, n_starts, out + 256*b);
        }
        for (int g = 0; g < CCQ_GROUPS && mantissa_bits > 0; ++g) {
            const int64_t at = 256*b + 64*g;
            encode_float(t, x + at, weights + 64*g, starts, n_starts, mantissa_bits, out + at);
        }
    }
    free(t);
    return 0;
}

// --- codebooks ----------------------------------------------------------------------------------------------------------------

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
