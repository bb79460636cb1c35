#include "recurrences.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ggml_ext {

static float * data_at(const ggml_tensor * t, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
    return (float *) ((char *) t->data + i0*t->nb[0] + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]);
}

// Consecutive parts of a tensor.
class part_list {
public:
    part_list(ggml_context * ctx, ggml_tensor * all) : ctx(ctx), all(all) {}

    ggml_tensor * next(int64_t ne0, int64_t ne1, int64_t ne2 = 1, int64_t ne3 = 1) {
        constexpr size_t size = sizeof(float);
        ggml_tensor * part = ggml_view_4d(ctx, all, ne0, ne1, ne2, ne3, ne0*size, ne0*ne1*size, ne0*ne1*ne2*size, offset);
        offset += ggml_nbytes(part);
        return part;
    }
    ggml_tensor * next(const ggml_tensor * like) { return next(like->ne[0], like->ne[1], like->ne[2], like->ne[3]); }

private:
    ggml_context * ctx;
    ggml_tensor *  all;
    size_t         offset = 0;
};

static ggml_tensor * make_custom(ggml_context * ctx, int64_t n, std::vector<ggml_tensor *> args, ggml_custom_op_t f) {
    return ggml_custom_4d(ctx, GGML_TYPE_F32, n, 1, 1, 1, args.data(), (int) args.size(), f, GGML_N_TASKS_MAX, nullptr);
}

// --- SSM_CONV: y[c, t] = sum over i of x[t + i, c] w[i, c] ------------------------------------------------------------

static void convolve_back(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * g = dst->src[0], * w = dst->src[1], * x = dst->src[2];
    const int64_t n_taps = w->ne[0], n_tokens = g->ne[1], n_channels = x->ne[1], length = x->ne[0];
    for (int64_t i = ith; i < n_channels*x->ne[2]; i += nth) {
        const int64_t c = i % n_channels, s = i / n_channels;
        for (int64_t j = 0; j < length; ++j) {
            float sum = 0.0f;
            for (int64_t tap = std::max<int64_t>(0, j - n_tokens + 1); tap <= std::min(n_taps - 1, j); ++tap) {
                sum += *data_at(g, c, j - tap, s) * *data_at(w, tap, c);
            }
            ((float *) dst->data)[i*length + j] = sum;
        }
    }
}

// --- SSM_SCAN: S = S exp(softplus(dt) A) + softplus(dt) x B^T, y = S C ------------------------------------------------

// The heads of a group share B and C. Their gradients are summed for each slot of heads, then over the slots, so that the sums do not depend
// on the number of threads.
static int64_t count_slots(int64_t n_heads) { return std::min<int64_t>(n_heads, 16); }

struct scan_state {
    std::vector<float> states, g;    // of all tokens: [state, dim, tokens]; gradient of the current one
    std::vector<float> decay, rates; // of the current token, by state; A
};

static void scan_back_head(const ggml_tensor * dst, int64_t h, int64_t s, float * g_b, float * g_c, scan_state & state) {
    const ggml_tensor * x = dst->src[0], * dt = dst->src[1], * a = dst->src[2], * b = dst->src[3], * c = dst->src[4], * g = dst->src[5];
    const int64_t n_dim = x->ne[0], n_heads = x->ne[1], n_tokens = x->ne[2], n_state = b->ne[0], n_groups = b->ne[1];
    const int64_t size = n_dim*n_state, group = h/(n_heads/n_groups);
    const auto softplus = [](float v) { return v > 20.0f ? v : std::log1p(std::exp(v)); };
    state.decay.resize(n_state);
    state.rates.resize(n_state);
    for (int64_t i = 0; i < n_state; ++i) {
        state.rates[i] = *data_at(a, a->ne[0] == 1 ? 0 : i, h);
    }
    const auto set_decay = [&](float step) {
        std::transform(state.rates.begin(), state.rates.end(), state.decay.begin(), [&](float rate) { return std::exp(step*rate); });
    };
    state.states.assign(size*(n_tokens + 1), 0.0f); // the first one is 0
    state.g.assign(size, 0.0f);
    for (int64_t t = 0; t < n_tokens; ++t) {
        const float   step = softplus(*data_at(dt, h, t, s));
        const float * before = &state.states[t*size], * in = data_at(b, 0, group, t, s);
        float *       after  = &state.states[(t + 1)*size];
        set_decay(step);
        for (int64_t j = 0; j < n_dim; ++j) {
            const float value = *data_at(x, j, h, t, s)*step;
            for (int64_t i = 0; i < n_state; ++i) {
                after[j*n_state + i] = before[j*n_state + i]*state.decay[i] + in[i]*value;
            }
        }
    }
    float * g_x = (float *) dst->data, * g_dt = g_x + ggml_nelements(x);
    for (int64_t t = n_tokens; t-- > 0;) {
        const float   raw = *data_at(dt, h, t, s), step = softplus(raw);
        const float * before = &state.states[t*size], * after = before + size;
        const float * in = data_at(b, 0, group, t, s), * out = data_at(c, 0, group, t, s);
        float *       g_in = g_b + ((s*n_tokens + t)*n_groups + group)*n_state, * g_out = g_c + (g_in - g_b);
        const int64_t row = ((s*n_tokens + t)*n_heads + h)*n_dim;
        double        g_step = 0;
        set_decay(step);
        for (int64_t j = 0; j < n_dim; ++j) {
            const float g_y = ((const float *) g->data)[row + j], value = *data_at(x, j, h, t, s);
            double      g_product = 0;
            for (int64_t i = 0; i < n_state; ++i) {
                const int64_t k   = j*n_state + i;
                const float   g_s = state.g[k] + g_y*out[i];
                g_out[i]  += g_y*after[k];
                g_in[i]   += g_s*value*step;
                g_product += g_s*in[i];
                g_step    += g_s*before[k]*state.decay[i]*state.rates[i];
                state.g[k] = g_s*state.decay[i];
            }
            g_x[row + j] = g_product*step;
            g_step      += g_product*value;
        }
        g_dt[(s*n_tokens + t)*n_heads + h] = g_step/(1.0 + std::exp(-raw));
    }
}

static void scan_back(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * x = dst->src[0], * b = dst->src[3];
    const int64_t n_heads = x->ne[1], n_slots = count_slots(n_heads), n = ggml_nelements(b);
    float *       sums = (float *) dst->data + ggml_nelements(x) + ggml_nelements(dst->src[1]);
    scan_state    state;
    for (int64_t slot = ith; slot < n_slots; slot += nth) {
        float * g_b = sums + slot*n, * g_c = g_b + n_slots*n;
        std::fill(g_b, g_b + n, 0.0f);
        std::fill(g_c, g_c + n, 0.0f);
        for (int64_t h = n_heads*slot/n_slots; h < n_heads*(slot + 1)/n_slots; ++h) {
            for (int64_t s = 0; s < x->ne[3]; ++s) {
                scan_back_head(dst, h, s, g_b, g_c, state);
            }
        }
    }
}

static input_gradients differentiate_scan(ggml_context * ctx, const ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * x = node->src[1], * dt = node->src[2], * a = node->src[3], * b = node->src[4], * c = node->src[5];
    const int64_t n_slots = count_slots(x->ne[1]), n = ggml_nelements(b);
    ggml_tensor * all = make_custom(ctx, ggml_nelements(x) + ggml_nelements(dt) + 2*n_slots*n, { x, dt, a, b, c, g }, scan_back);
    part_list     parts(ctx, all);
    ggml_tensor * g_x = parts.next(x), * g_dt = parts.next(dt);
    const auto    sum = [&](ggml_tensor * like) {
        ggml_tensor * total = ggml_repeat_back(ctx, parts.next(n, n_slots), ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n));
        return ggml_reshape_4d(ctx, total, like->ne[0], like->ne[1], like->ne[2], like->ne[3]);
    };
    ggml_tensor * g_b = sum(b), * g_c = sum(c);
    return { { x, g_x }, { dt, g_dt }, { b, g_b }, { c, g_c } };
}

// --- GATED_DELTA_NET: S = S exp(g), d = beta (v - S k), S = S + d k^T, y = S q/sqrt(n) -------------------------------

static void delta_back_head(const ggml_tensor * dst, int64_t h, int64_t s, std::vector<float> & states) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * gate = dst->src[3], * beta = dst->src[4], * g = dst->src[5];
    const int64_t n = v->ne[0], n_heads = v->ne[1], n_tokens = v->ne[2], n_gates = gate->ne[0];
    const float   scale = 1.0f/std::sqrt((float) n);
    std::vector<float> g_state(n*n), decayed(n*n), delta(n), factor(n);
    states.assign(n*n*(n_tokens + 1), 0.0f); // rows of the state: of the values; the first one is 0
    // Compute the state before the update, and the difference that the update adds, of token t.
    const auto prepare = [&](int64_t t, const float * key) {
        for (int64_t i = 0; i < n; ++i) {
            factor[i] = std::exp(*data_at(gate, n_gates == 1 ? 0 : i, h, t, s));
        }
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0.0f;
            for (int64_t i = 0; i < n; ++i) {
                decayed[j*n + i] = states[(t*n + j)*n + i]*factor[i];
                sum += decayed[j*n + i]*key[i];
            }
            delta[j] = *data_at(v, j, h, t, s) - sum;
        }
    };
    for (int64_t t = 0; t < n_tokens; ++t) {
        const float * key = data_at(k, 0, h % k->ne[1], t, s), b = *data_at(beta, 0, h, t, s);
        prepare(t, key);
        for (int64_t j = 0; j < n; ++j) {
            for (int64_t i = 0; i < n; ++i) {
                states[((t + 1)*n + j)*n + i] = decayed[j*n + i] + delta[j]*b*key[i];
            }
        }
    }
    const int64_t n_values = ggml_nelements(v);
    float * g_q = (float *) dst->data, * g_k = g_q + n_values, * g_v = g_k + n_values, * g_gate = g_v + n_values,
          * g_beta = g_gate + ggml_nelements(gate);
    std::vector<float> g_query(n), g_key(n), g_factor(n);
    for (int64_t t = n_tokens; t-- > 0;) {
        const int64_t row = (s*n_tokens + t)*n_heads + h;
        const float * key = data_at(k, 0, h % k->ne[1], t, s), * query = data_at(q, 0, h % q->ne[1], t, s);
        const float * g_y = (const float *) g->data + row*n, b = *data_at(beta, 0, h, t, s);
        float         g_b = 0.0f;
        prepare(t, key);
        std::fill(g_query.begin(), g_query.end(), 0.0f);
        std::fill(g_key.begin(), g_key.end(), 0.0f);
        std::fill(g_factor.begin(), g_factor.end(), 0.0f);
        for (int64_t j = 0; j < n; ++j) {
            float *       g_s = &g_state[j*n];
            const float * before = &decayed[j*n], * after = &states[((t + 1)*n + j)*n];
            float         g_update = 0.0f; // gradient of b delta[j]
            for (int64_t i = 0; i < n; ++i) {
                g_s[i]     += scale*g_y[j]*query[i];
                g_query[i] += scale*g_y[j]*after[i];
                g_update   += g_s[i]*key[i];
            }
            g_b            += g_update*delta[j];
            g_v[row*n + j]  = g_update*b;
            for (int64_t i = 0; i < n; ++i) {
                g_key[i]    += g_s[i]*delta[j]*b - g_update*b*before[i];
                g_s[i]      -= g_update*b*key[i];
                g_factor[i] += g_s[i]*before[i];
                g_s[i]      *= factor[i];
            }
        }
        std::copy(g_query.begin(), g_query.end(), g_q + row*n);
        std::copy(g_key.begin(), g_key.end(), g_k + row*n);
        if (n_gates == 1) {
            g_gate[row] = std::accumulate(g_factor.begin(), g_factor.end(), 0.0f);
        } else {
            std::copy(g_factor.begin(), g_factor.end(), g_gate + row*n);
        }
        g_beta[row] = g_b;
    }
}

static void delta_back(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * v = dst->src[2];
    std::vector<float>  states;
    for (int64_t i = ith; i < v->ne[1]*v->ne[3]; i += nth) {
        delta_back_head(dst, i % v->ne[1], i / v->ne[1], states);
    }
}

static input_gradients differentiate_delta(ggml_context * ctx, const ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * gate = node->src[3], * beta = node->src[4];
    if (q->ne[3] != v->ne[3] || k->ne[3] != v->ne[3]) {
        return {};
    }
    ggml_tensor * all = make_custom(ctx, 3*ggml_nelements(v) + ggml_nelements(gate) + ggml_nelements(beta), { q, k, v, gate, beta, g }, delta_back);
    part_list     parts(ctx, all);
    // head h of the values uses head h modulo their number of the queries and keys
    const auto sum = [&](ggml_tensor * t) {
        const int64_t n = t->ne[0], n_heads = t->ne[1], n_tokens = t->ne[2]*t->ne[3];
        ggml_tensor * total = ggml_repeat_back(ctx, parts.next(n*n_heads, v->ne[1]/n_heads, n_tokens),
                                               ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n*n_heads, 1, n_tokens));
        return ggml_reshape_4d(ctx, total, n, n_heads, t->ne[2], t->ne[3]);
    };
    ggml_tensor * g_q = sum(q), * g_k = sum(k), * g_v = parts.next(v), * g_gate = parts.next(gate), * g_beta = parts.next(beta);
    return { { q, g_q }, { k, g_k }, { v, g_v }, { gate, g_gate }, { beta, g_beta } };
}

// --- DSV4_HC_COMB: softmax of rows, then columns and rows divided by their sums in turn --------------------------------

enum { N_STREAMS = 4 };

// Divide the rows (columns if `by_column`) of a matrix by their sums.
static void divide_by_sums(float * m, bool by_column, float eps) {
    for (int i = 0; i < N_STREAMS; ++i) {
        float sum = eps;
        for (int j = 0; j < N_STREAMS; ++j) {
            sum += m[by_column ? i + N_STREAMS*j : j + N_STREAMS*i];
        }
        for (int j = 0; j < N_STREAMS; ++j) {
            m[by_column ? i + N_STREAMS*j : j + N_STREAMS*i] /= sum;
        }
    }
}

// Replace the gradient of the result by that of m.
static void divide_by_sums_back(const float * m, float * g, bool by_column, float eps) {
    for (int i = 0; i < N_STREAMS; ++i) {
        const auto index = [&](int j) { return by_column ? i + N_STREAMS*j : j + N_STREAMS*i; };
        float sum = eps, dot = 0.0f;
        for (int j = 0; j < N_STREAMS; ++j) {
            sum += m[index(j)];
            dot += g[index(j)]*m[index(j)];
        }
        for (int j = 0; j < N_STREAMS; ++j) {
            g[index(j)] = (g[index(j)] - dot/sum)/sum;
        }
    }
}

static void mix_back(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * mixes = dst->src[0], * scale = dst->src[1], * base = dst->src[2], * g = dst->src[3], * node = dst->src[4];
    constexpr int size = N_STREAMS*N_STREAMS, first = 2*N_STREAMS;
    const float   eps = ggml_get_op_params_f32(node, 0), factor = *data_at(scale, 2);
    const int     n_steps = 2*ggml_get_op_params_i32(node, 1) - 1; // columns, rows, columns, ...
    std::vector<float> steps((n_steps + 1)*size);
    for (int64_t t = ith; t < mixes->ne[1]; t += nth) {
        float p[size], gradient[size];
        for (int row = 0; row < N_STREAMS; ++row) {
            const int end = (row + 1)*N_STREAMS;
            float     sum = 0.0f, max = -INFINITY;
            for (int i = row*N_STREAMS; i < end; ++i) {
                max = std::max(max, p[i] = *data_at(mixes, first + i, t)*factor + *data_at(base, first + i));
            }
            for (int i = row*N_STREAMS; i < end; ++i) {
                sum += p[i] = std::exp(p[i] - max);
            }
            for (int i = row*N_STREAMS; i < end; ++i) {
                p[i] /= sum;
                steps[i] = p[i] + eps;
            }
        }
        for (int step = 0; step < n_steps; ++step) {
            std::copy_n(&steps[step*size], size, &steps[(step + 1)*size]);
            divide_by_sums(&steps[(step + 1)*size], step % 2 == 0, eps);
        }
        for (int i = 0; i < size; ++i) {
            gradient[i] = *data_at(g, i % N_STREAMS, i / N_STREAMS, t);
        }
        for (int step = n_steps; step-- > 0;) {
            divide_by_sums_back(&steps[step*size], gradient, step % 2 == 0, eps);
        }
        float * out = (float *) dst->data + t*mixes->ne[0];
        std::fill(out, out + first, 0.0f);
        for (int row = 0; row < N_STREAMS; ++row) {
            float dot = 0.0f;
            for (int i = row*N_STREAMS; i < (row + 1)*N_STREAMS; ++i) {
                dot += gradient[i]*p[i];
            }
            for (int i = row*N_STREAMS; i < (row + 1)*N_STREAMS; ++i) {
                out[first + i] = factor*p[i]*(gradient[i] - dot);
            }
        }
    }
}

input_gradients differentiate_recurrence(ggml_context * ctx, const ggml_tensor * node, ggml_tensor * g) {
    ggml_tensor * x = node->src[0];
    switch (node->op) {
        case GGML_OP_SSM_CONV:
            return { { x, part_list(ctx, make_custom(ctx, ggml_nelements(x), { g, node->src[1], x }, convolve_back)).next(x) } };
        case GGML_OP_SSM_SCAN:
            return differentiate_scan(ctx, node, g);
        case GGML_OP_GATED_DELTA_NET:
            return differentiate_delta(ctx, node, g);
        case GGML_OP_DSV4_HC_COMB: {
            std::vector<ggml_tensor *> args = { x, node->src[1], node->src[2], g, const_cast<ggml_tensor *>(node) };
            return { { x, part_list(ctx, make_custom(ctx, ggml_nelements(x), args, mix_back)).next(x) } };
        }
        default:
            return {};
    }
}

} // namespace ggml_ext
