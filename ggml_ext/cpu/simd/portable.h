// Portable C++, what the others are compared with. Included by simd.h inside namespace ggml_ext.

#define GGML_EXT_ISA "scalar"

struct u8x32 { uint8_t v[32]; };

static inline u8x32 load(const uint8_t * p)      { u8x32 r; memcpy(r.v, p, 32); return r; }
static inline void  store(uint8_t * p, u8x32 a)  { memcpy(p, a.v, 32); }
static inline u8x32 operator|(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] |= b.v[i]; } return a; }

template <int S> static inline u8x32 field(u8x32 a, uint8_t mask) {
    for (int i = 0; i < 32; ++i) {
        a.v[i] = (uint8_t) ((S >= 0 ? a.v[i] >> (S >= 0 ? S : 0) : a.v[i] << (S < 0 ? -S : 0)) & mask);
    }
    return a;
}

struct u15x32 { uint16_t v[32]; };

template <int A, int B> static inline u15x32 multiply_add(u8x32 a) {
    u15x32 c;
    for (int i = 0; i < 32; ++i) { c.v[i] = (uint16_t) (A*a.v[i] + B); }
    return c;
}

template <int S> static inline u8x32 field(u15x32 c) {
    u8x32 r;
    for (int i = 0; i < 32; ++i) { r.v[i] = c.v[i] >> S & 63; }
    return r;
}

static inline float half_to_float(ggml_half h) { return ggml_fp16_to_fp32(h); }

struct table8x8 { uint8_t v[8]; };

static inline table8x8 load_table(const uint8_t * p, uint8_t mask) {
    table8x8 t;
    for (int k = 0; k < 8; ++k) { t.v[k] = p[k] & mask; }
    return t;
}
static inline u8x32 look_up(table8x8 t, u8x32 i) { for (int k = 0; k < 32; ++k) { i.v[k] = t.v[i.v[k]]; } return i; }

struct scales4 { int v[4]; };

static inline scales4 look_up_scales(uint32_t table, uint8_t indices) {
    scales4 s;
    for (int k = 0; k < 4; ++k) { s.v[k] = table >> 8*(indices >> 2*k & 3) & 255; }
    return s;
}

using i32_sum = int32_t;

template <int Q_MAX, int N_VECS> struct dot_sum {
    int32_t acc = 0;
    void add(u8x32 q, const int8_t * y) {
        for (int i = 0; i < 32; ++i) { acc += q.v[i]*y[i]; }
    }
    i32_sum total() const { return acc; }
};

template <int Q_MAX> struct scaled_dot_sum {
    scales4 scales;
    int32_t acc = 0;
    template <int K> void add(u8x32 q0, u8x32 q1, const int8_t * y) {
        dot_sum<Q_MAX, 2> sum;
        sum.add(q0, y);
        sum.add(q1, y + 32);
        acc += scales.v[K]*sum.acc;
    }
    i32_sum total() const { return acc; }
};

struct f32_sum {
    float acc = 0;
    void  add(float scale, i32_sum sum) { acc += scale*(float) sum; }
    float total() const { return acc; }
};

static inline i32_sum activation_sum(const int16_t * bsums, scales4 scales = {{1, 1, 1, 1}}) {
    int32_t sum = 0;
    for (int g = 0; g < QK_K/16; ++g) { sum += scales.v[g/4]*bsums[g]; }
    return sum;
}
