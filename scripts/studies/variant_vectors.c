// Convolutional codes: a group of 64 weights is made of vectors, each of which takes a code of a table.
#include "variant_search.h"

enum { CCQ_GROUP = 64, CCQ_GROUPS = 4, MAX_CODES = 512, MAX_DIM = 4, MAX_VECTORS = 32 };

struct table {
    int   n_codes, dim;
    float v[MAX_DIM][MAX_CODES], vv[MAX_DIM][MAX_CODES]; // values and their squares
};
struct vectors {
    int n_tables, n_vectors, which[MAX_VECTORS];
    struct table tables[3];
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
