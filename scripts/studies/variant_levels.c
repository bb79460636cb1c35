// ITQ3_S and other transforms: eight levels s[g]*(q - z[p]) in steps of equal size. g counts groups of weights with one scale, p the
// parts of a span that share a zero point.
#include "variant_search.h"

// Sweeps, rounds and refits as in encode/levels.h and itq3_s.c.
enum { MAX_SPAN = 512, MAX_GROUPS = MAX_SPAN/16, MAX_SWEEPS = 4, ROUNDS = 3, N_REFITS = 4 };

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
