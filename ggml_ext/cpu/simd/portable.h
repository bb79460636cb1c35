// Portable C++, what the others are compared with. Included by simd.h inside namespace ggml_ext.

#define GGML_EXT_ISA "scalar"

struct u8x32 { uint8_t v[32]; };

static inline u8x32 load(const uint8_t * p)      { u8x32 r; memcpy(r.v, p, 32); return r; }
static inline void  store(uint8_t * p, u8x32 a)  { memcpy(p, a.v, 32); }
static inline u8x32 operator|(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] |= b.v[i]; } return a; }
static inline u8x32 operator^(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] ^= b.v[i]; } return a; }
static inline u8x32 operator+(u8x32 a, u8x32 b)  { for (int i = 0; i < 32; ++i) { a.v[i] = (uint8_t) (a.v[i] + b.v[i]); } return a; }

static inline u8x32 shift_lanes(u8x32 a, uint8_t first) {
    u8x32 r;
    r.v[0] = first;
    memcpy(r.v + 1, a.v, 31);
    return r;
}

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

using i32_sum = int32_t;

template <int Q_MAX, int N_VECS> struct dot_sum {
    int32_t acc = 0;
    void add(u8x32 q, const int8_t * y) {
        for (int i = 0; i < 32; ++i) { acc += q.v[i]*y[i]; }
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
