// Portable C++, the reference for the other sets. Included by simd.h inside namespace ggml_ext.

#define GGML_EXT_ISA "scalar"

struct u8x32 { uint8_t v[32]; };

static inline u8x32 load(const uint8_t * p)      { u8x32 r; memcpy(r.v, p, 32); return r; }
static inline void  store(uint8_t * p, u8x32 a)  { memcpy(p, a.v, 32); }
static inline u8x32 operator|(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] |= b.v[i]; } return a; }
static inline u8x32 operator^(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] ^= b.v[i]; } return a; }
static inline u8x32 operator+(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] = (uint8_t) (a.v[i] + b.v[i]); } return a; }

static inline u8x32 load_behind(uint8_t first, const uint8_t * p) {
    u8x32 r = load(p - 1);
    r.v[0] = first;
    return r;
}

static inline u8x32 load8x4(const uint8_t * p0, const uint8_t * p1, const uint8_t * p2, const uint8_t * p3) {
    const uint8_t * p[4] = {p0, p1, p2, p3};
    u8x32 r;
    for (int b = 0; b < 4; ++b) { memcpy(r.v + 8*b, p[b], 8); }
    return r;
}

static inline u8x32 words8(const uint32_t (&w)[8]) { return load((const uint8_t *) w); }

struct u8x16 { uint8_t v[16]; };

static inline u8x16 load16(const uint8_t * p) {
    u8x16 r;
    memcpy(r.v, p, sizeof(r.v));
    return r;
}
static inline u8x16 words4(const uint32_t (&w)[4]) { return load16((const uint8_t *) w); }
static inline u8x16 load16_behind(uint8_t first, const uint8_t * p) {
    u8x16 r = load16(p - 1);
    r.v[0] = first;
    return r;
}
static inline u8x32 spread_nibbles(u8x16 a, u8x16 b) {
    u8x32 r;
    for (int i = 0; i < 16; ++i) {
        r.v[2*i]     = (uint8_t) (a.v[i] >> 4 | b.v[i] << 4);
        r.v[2*i + 1] = b.v[i];
    }
    return r;
}

template <int N> static inline u8x32 first_of(u8x32 a) {
    for (int i = 0; i < 32; ++i) { a.v[i] = i%N ? 0 : a.v[i]; }
    return a;
}

template <int N> static inline u8x32 shift_lanes(u8x32 a, u8x32 first) {
    for (int i = 0; i < 32; ++i) { first.v[i] |= i%N ? a.v[i - 1] : 0; }
    return first;
}

template <int S> static inline u8x32 field(u8x32 a, uint8_t mask) {
    for (int i = 0; i < 32; ++i) {
        a.v[i] = (uint8_t) ((S >= 0 ? a.v[i] >> (S >= 0 ? S : 0) : a.v[i] << (S < 0 ? -S : 0)) & mask);
    }
    return a;
}

template <int S> static inline u8x32 shifted(u8x32 a) { return field<S>(a, 0xff); }

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

struct table16 { uint8_t v[16]; };

static inline table16 load_table(const uint8_t * p, uint8_t mask) {
    table16 t = {};
    for (int k = 0; k < 8; ++k) { t.v[k] = p[k] & mask; }
    return t;
}

static inline table16 load_table16(const uint8_t * p) {
    table16 t;
    memcpy(t.v, p, 16);
    return t;
}
static inline u8x32 look_up(table16 t, u8x32 i) { for (int k = 0; k < 32; ++k) { i.v[k] = t.v[i.v[k]]; } return i; }

// Four partial sums, one per eight bytes.
struct i32_sum { int32_t v[4]; };

static inline i32_sum operator+(i32_sum a, i32_sum b) { for (int i = 0; i < 4; ++i) { a.v[i] += b.v[i]; } return a; }
static inline i32_sum operator*(i32_sum a, int b)     { for (int i = 0; i < 4; ++i) { a.v[i] *= b; } return a; }

template <int Q_MAX, int N_VECS> struct dot_sum {
    i32_sum acc = {};
    void add(u8x32 q, const int8_t * y) {
        for (int i = 0; i < 32; ++i) { acc.v[i/8] += q.v[i]*y[i]; }
    }
    i32_sum total() const { return acc; }
};
template <int Q_MAX> using quarter_dot_sum = dot_sum<Q_MAX, 8>;

struct f32x4 { float v[4]; };

static inline f32x4 load4(const float * p)      { f32x4 r; memcpy(r.v, p, sizeof(r.v)); return r; }
static inline void  store4(float * p, f32x4 a)  { memcpy(p, a.v, sizeof(a.v)); }
static inline f32x4 operator*(f32x4 a, float b) { for (int i = 0; i < 4; ++i) { a.v[i] *= b; } return a; }
static inline f32x4 e5m3_to_float(uint8_t d0, uint8_t d1, uint8_t d2, uint8_t d3) {
    return {{ggml_ext_e5m3_to_float(d0), ggml_ext_e5m3_to_float(d1), ggml_ext_e5m3_to_float(d2), ggml_ext_e5m3_to_float(d3)}};
}

// Floats for the lanes of an i32_sum.
constexpr int N_LANES = 4;
using f32_lanes = f32x4;

static inline f32_lanes spread(float a)   { return {{a, a, a, a}}; }
static inline f32_lanes spread(f32x4 a)   { return a; }
static inline f32_lanes spread(scales4 s) { f32x4 r; for (int i = 0; i < 4; ++i) { r.v[i] = (float) s.v[i]; } return r; }
static inline f32_lanes lane_sums(const int16_t * bsums) {
    f32x4 r;
    for (int i = 0; i < 4; ++i) { r.v[i] = (float) (bsums[4*i] + bsums[4*i + 1] + bsums[4*i + 2] + bsums[4*i + 3]); }
    return r;
}

struct f32_sum {
    f32x4 acc = {};
    void  add(f32_lanes scale, i32_sum sum, f32_lanes a, f32_lanes b) {
        for (int i = 0; i < 4; ++i) { acc.v[i] += scale.v[i]*((float) sum.v[i] + a.v[i]*b.v[i]); }
    }
    float total() const    { return acc.v[0] + acc.v[1] + acc.v[2] + acc.v[3]; }
    f32x4 quarters() const { return acc; }
};

// --- activations ---

struct f32x8 { float v[8]; };

static inline f32x8 load(const float * p)        { f32x8 r; memcpy(r.v, p, sizeof(r.v)); return r; }
static inline void  store(float * p, f32x8 a)    { memcpy(p, a.v, sizeof(a.v)); }
static inline f32x8 operator+(f32x8 a, f32x8 b)  { for (int i = 0; i < 8; ++i) { a.v[i] += b.v[i]; } return a; }
static inline f32x8 operator-(f32x8 a, f32x8 b)  { for (int i = 0; i < 8; ++i) { a.v[i] -= b.v[i]; } return a; }
static inline f32x8 operator*(f32x8 a, f32x8 b)  { for (int i = 0; i < 8; ++i) { a.v[i] *= b.v[i]; } return a; }
static inline f32x8 operator*(f32x8 a, float b)  { for (int i = 0; i < 8; ++i) { a.v[i] *= b;      } return a; }

template <int STRIDE> static inline f32x8 butterfly(f32x8 a) {
    f32x8 r;
    for (int i = 0; i < 8; ++i) {
        r.v[i] = i & STRIDE ? a.v[i - STRIDE] - a.v[i] : a.v[i] + a.v[i + STRIDE];
    }
    return r;
}

struct magnitude_max {
    uint32_t acc = 0;
    void add(f32x8 a) {
        for (const float v : a.v) {
            uint32_t bits;
            memcpy(&bits, &v, sizeof(bits));
            bits &= INT32_MAX;
            acc = acc > bits ? acc : bits;
        }
    }
    float total() const { float f; memcpy(&f, &acc, sizeof(f)); return f; }
};

static inline u8x32 round_to_i8(const f32x8 (&a)[4]) {
    u8x32 r;
    for (int i = 0; i < 32; ++i) { r.v[i] = (uint8_t) (int8_t) nearbyintf(a[i/8].v[i%8]); }
    return r;
}

static inline void sums_of_16(u8x32 q, int16_t * sums) {
    for (int g = 0; g < 2; ++g) {
        int sum = 0;
        for (int i = 0; i < 16; ++i) { sum += (int8_t) q.v[16*g + i]; }
        sums[g] = (int16_t) sum;
    }
}

struct sums_of_8 {
    int acc[4] = {};
    void add(u8x32 q) { // eight vectors
        for (int i = 0; i < 32; ++i) { acc[i/8] += (int8_t) q.v[i]; }
    }
    void total(float * sums) const {
        for (int b = 0; b < 4; ++b) { sums[b] = (float) acc[b]; }
    }
};
