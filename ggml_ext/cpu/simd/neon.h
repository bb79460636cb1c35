// NEON of 64-bit ARM, with dot product instructions if enabled. Included by simd.h inside namespace ggml_ext.

#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
#define GGML_EXT_ISA "neon+i8mm" // the GEMM
#elif defined(__ARM_FEATURE_DOTPROD)
#define GGML_EXT_ISA "neon+dotprod"
#else
#define GGML_EXT_ISA "neon"
#endif

struct u8x32 { uint8x16_t v[2]; };

static inline u8x32 load(const uint8_t * p)     { return {{vld1q_u8(p), vld1q_u8(p + 16)}}; }
static inline void  store(uint8_t * p, u8x32 a) { vst1q_u8(p, a.v[0]); vst1q_u8(p + 16, a.v[1]); }
static inline u8x32 operator|(u8x32 a, u8x32 b) { return {{vorrq_u8(a.v[0], b.v[0]), vorrq_u8(a.v[1], b.v[1])}}; }
static inline u8x32 operator^(u8x32 a, u8x32 b) { return {{veorq_u8(a.v[0], b.v[0]), veorq_u8(a.v[1], b.v[1])}}; }
static inline u8x32 operator+(u8x32 a, u8x32 b) { return {{vaddq_u8(a.v[0], b.v[0]), vaddq_u8(a.v[1], b.v[1])}}; }

static inline u8x32 load_behind(uint8_t first, const uint8_t * p) {
    return {{vsetq_lane_u8(first, vld1q_u8(p - 1), 0), vld1q_u8(p + 15)}};
}

static inline u8x32 load8x4(const uint8_t * p0, const uint8_t * p1, const uint8_t * p2, const uint8_t * p3) {
    return {{vcombine_u8(vld1_u8(p0), vld1_u8(p1)), vcombine_u8(vld1_u8(p2), vld1_u8(p3))}};
}

static inline u8x32 words8(const uint32_t (&w)[8]) { return load((const uint8_t *) w); }

struct u8x16 { uint8x16_t v; };

static inline u8x16 load16(const uint8_t * p)      { return {vld1q_u8(p)}; }
static inline u8x16 words4(const uint32_t (&w)[4]) { return {vreinterpretq_u8_u32(vld1q_u32(w))}; }
static inline u8x16 load16_behind(uint8_t first, const uint8_t * p) { return {vsetq_lane_u8(first, vld1q_u8(p - 1), 0)}; }
static inline u8x32 spread_nibbles(u8x16 a, u8x16 b) {
    const uint8x16_t both = vsliq_n_u8(vshrq_n_u8(a.v, 4), b.v, 4);
    return {{vzip1q_u8(both, b.v), vzip2q_u8(both, b.v)}};
}

template <int N> static inline u8x32 first_of(u8x32 a) {
    const uint8x16_t mask = N == 8 ? vreinterpretq_u8_u64(vdupq_n_u64(0xff)) : vreinterpretq_u8_u32(vdupq_n_u32(0xff));
    return {{vandq_u8(a.v[0], mask), vandq_u8(a.v[1], mask)}};
}

template <int N> static inline u8x32 shift_lanes(u8x32 a, u8x32 first) {
    const auto up = [](uint8x16_t x) {
        return N == 8 ? vreinterpretq_u8_u64(vshlq_n_u64(vreinterpretq_u64_u8(x), 8)) : vreinterpretq_u8_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 8));
    };
    return {{vorrq_u8(up(a.v[0]), first.v[0]), vorrq_u8(up(a.v[1]), first.v[1])}};
}

template <int S> static inline uint8x16_t shift(uint8x16_t a) {
    if constexpr (S > 0) { return vshrq_n_u8(a, S); }
    if constexpr (S < 0) { return vshlq_n_u8(a, -S); }
    return a;
}
template <int S> static inline u8x32 field(u8x32 a, uint8_t mask) {
    return {{vandq_u8(shift<S>(a.v[0]), vdupq_n_u8(mask)), vandq_u8(shift<S>(a.v[1]), vdupq_n_u8(mask))}};
}
template <int S> static inline u8x32 shifted(u8x32 a) { return {{shift<S>(a.v[0]), shift<S>(a.v[1])}}; }

static inline float half_to_float(ggml_half h) {
    __fp16 f;
    memcpy(&f, &h, sizeof(f));
    return f;
}

struct table16 { uint8x16_t v; };

static inline table16 load_table(const uint8_t * p, uint8_t mask) {
    const uint8x8_t t = vand_u8(vld1_u8(p), vdup_n_u8(mask));
    return {vcombine_u8(t, t)};
}
static inline table16 load_table16(const uint8_t * p) { return {vld1q_u8(p)}; }
static inline u8x32 look_up(table16 t, u8x32 i) { return {{vqtbl1q_u8(t.v, i.v[0]), vqtbl1q_u8(t.v, i.v[1])}}; }

// 15-bit codes of the bytes in order, in 16-bit lanes.
struct u15x32 { uint16x8_t v[4]; };

template <int A, int B> static inline u15x32 multiply_add(u8x32 a) {
    static_assert(A >= 0 && A <= 255 && B >= 0 && 255*A + B < 1 << 15, "codes have 15 bits");
    const auto lo = [](uint8x16_t x) { return vmlal_u8(vdupq_n_u16(B), vget_low_u8(x), vdup_n_u8(A)); };
    const auto hi = [](uint8x16_t x) { return vmlal_high_u8(vdupq_n_u16(B), x, vdupq_n_u8(A)); };
    return {{lo(a.v[0]), hi(a.v[0]), lo(a.v[1]), hi(a.v[1])}};
}

template <int S> static inline u8x32 field(u15x32 c) {
    const auto narrow = [](uint16x8_t x) { return vmovn_u16(S > 0 ? vshrq_n_u16(x, S > 0 ? S : 1) : x); };
    return {{vandq_u8(vcombine_u8(narrow(c.v[0]), narrow(c.v[1])), vdupq_n_u8(63)),
             vandq_u8(vcombine_u8(narrow(c.v[2]), narrow(c.v[3])), vdupq_n_u8(63))}};
}

// Four partial sums; quarter_dot_sum has one per eight bytes.
struct i32_sum { int32x4_t v; };

static inline i32_sum operator+(i32_sum a, i32_sum b) { return {vaddq_s32(a.v, b.v)}; }
static inline i32_sum operator*(i32_sum a, int b)     { return {vmulq_n_s32(a.v, b)}; }

// Sum of q*y over N_VECS vectors of codes 0..Q_MAX and activations, one accumulator per half of a vector.
template <int Q_MAX, int N_VECS> struct dot_sum {
    static_assert(Q_MAX <= 127, "codes are int8");
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t acc[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    void add(u8x32 q, const int8_t * y) {
        for (int h = 0; h < 2; ++h) {
            acc[h] = vdotq_s32(acc[h], vreinterpretq_s8_u8(q.v[h]), vld1q_s8(y + 16*h));
        }
    }
    i32_sum total() const { return {vpaddq_s32(acc[0], acc[1])}; } // one per eight bytes
#else
    // a half adds two products to each int16; N_VECS of them may share an accumulator if it cannot overflow
    static constexpr bool fits_i16 = 2*Q_MAX*ACT_MAX*N_VECS <= INT16_MAX;
    static_assert(2*Q_MAX*ACT_MAX <= INT16_MAX, "two products would overflow");
    int16x8_t acc16[2] = {vdupq_n_s16(0), vdupq_n_s16(0)};
    int32x4_t acc32[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    void add(u8x32 q, const int8_t * y) {
        for (int h = 0; h < 2; ++h) {
            const int8x16_t vq = vreinterpretq_s8_u8(q.v[h]), vy = vld1q_s8(y + 16*h);
            const int16x8_t p  = vmlal_high_s8(fits_i16 ? vmlal_s8(acc16[h], vget_low_s8(vq), vget_low_s8(vy))
                                                        : vmull_s8(vget_low_s8(vq), vget_low_s8(vy)), vq, vy);
            if (fits_i16) {
                acc16[h] = p;
            } else {
                acc32[h] = vpadalq_s16(acc32[h], p);
            }
        }
    }
    i32_sum total() const {
        return {fits_i16 ? vpadalq_s16(vpaddlq_s16(acc16[0]), acc16[1]) : vaddq_s32(acc32[0], acc32[1])};
    }
#endif
};

#if !defined(__ARM_FEATURE_DOTPROD)
// As dot_sum, with the eight bytes of each half of a vector apart.
template <int Q_MAX> struct quarter_dot_sum {
    static_assert(2*Q_MAX*ACT_MAX <= INT16_MAX, "two products would overflow");
    int32x4_t acc[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    void add(u8x32 q, const int8_t * y) {
        for (int h = 0; h < 2; ++h) {
            const int8x16_t vq = vreinterpretq_s8_u8(q.v[h]), vy = vld1q_s8(y + 16*h);
            acc[2*h]     = vpadalq_s16(acc[2*h],     vmull_s8(vget_low_s8(vq), vget_low_s8(vy)));
            acc[2*h + 1] = vpadalq_s16(acc[2*h + 1], vmull_high_s8(vq, vy));
        }
    }
    i32_sum total() const { return {vpaddq_s32(vpaddq_s32(acc[0], acc[1]), vpaddq_s32(acc[2], acc[3]))}; }
};
#else
template <int Q_MAX> using quarter_dot_sum = dot_sum<Q_MAX, 8>;
#endif

struct f32x4 { float32x4_t v; };

static inline f32x4 load4(const float * p)      { return {vld1q_f32(p)}; }
static inline void  store4(float * p, f32x4 a)  { vst1q_f32(p, a.v); }
static inline f32x4 operator*(f32x4 a, float b) { return {vmulq_n_f32(a.v, b)}; }
static inline f32x4 e5m3_to_float(uint8_t d0, uint8_t d1, uint8_t d2, uint8_t d3) {
    const uint16_t d[4] = {(uint16_t) (d0 << 7), (uint16_t) (d1 << 7), (uint16_t) (d2 << 7), (uint16_t) (d3 << 7)};
    return {vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(d))), GGML_EXT_E5M3_FACTOR)};
}

// Floats for the lanes of an i32_sum.
constexpr int N_LANES = 4;
using f32_lanes = f32x4;

static inline f32_lanes spread(float a)   { return {vdupq_n_f32(a)}; }
static inline f32_lanes spread(f32x4 a)   { return a; }
static inline f32_lanes spread(scales4 s) { return {vcvtq_f32_s32(vld1q_s32(s.v))}; }
static inline f32_lanes lane_sums(const int16_t * bsums) {
    return {vcvtq_f32_s32(vpaddq_s32(vpaddlq_s16(vld1q_s16(bsums)), vpaddlq_s16(vld1q_s16(bsums + 8))))};
}

struct f32_sum {
    float32x4_t acc = vdupq_n_f32(0);
    void  add(f32_lanes scale, i32_sum sum, f32_lanes a, f32_lanes b) {
        acc = vfmaq_f32(acc, vfmaq_f32(vcvtq_f32_s32(sum.v), a.v, b.v), scale.v);
    }
    float total() const    { return vaddvq_f32(acc); }
    f32x4 quarters() const { return {acc}; }
};

// --- activations ---

struct f32x8 { float32x4_t v[2]; };

static inline f32x8 load(const float * p)        { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
static inline void  store(float * p, f32x8 a)    { vst1q_f32(p, a.v[0]); vst1q_f32(p + 4, a.v[1]); }
static inline f32x8 operator+(f32x8 a, f32x8 b)  { return {{vaddq_f32(a.v[0], b.v[0]), vaddq_f32(a.v[1], b.v[1])}}; }
static inline f32x8 operator-(f32x8 a, f32x8 b)  { return {{vsubq_f32(a.v[0], b.v[0]), vsubq_f32(a.v[1], b.v[1])}}; }
static inline f32x8 operator*(f32x8 a, f32x8 b)  { return {{vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1])}}; }
static inline f32x8 operator*(f32x8 a, float b)  { return {{vmulq_n_f32(a.v[0], b), vmulq_n_f32(a.v[1], b)}}; }

// Within four lanes: swapped + (a with the second of each pair negated) = (u + v, u - v).
template <int STRIDE> static inline float32x4_t butterfly(float32x4_t a) {
    constexpr uint32_t sign = 0x80000000;
    const uint32_t    neg[4]  = {0, STRIDE == 1 ? sign : 0, STRIDE == 2 ? sign : 0, sign};
    const float32x4_t swapped = STRIDE == 1 ? vrev64q_f32(a) : vextq_f32(a, a, 2);
    return vaddq_f32(swapped, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vld1q_u32(neg))));
}
template <int STRIDE> static inline f32x8 butterfly(f32x8 a) {
    if constexpr (STRIDE == 4) {
        return {{vaddq_f32(a.v[0], a.v[1]), vsubq_f32(a.v[0], a.v[1])}};
    } else {
        return {{butterfly<STRIDE>(a.v[0]), butterfly<STRIDE>(a.v[1])}};
    }
}

struct magnitude_max {
    uint32x4_t acc = vdupq_n_u32(0);
    void add(f32x8 a) {
        for (const float32x4_t v : a.v) {
            acc = vmaxq_u32(acc, vreinterpretq_u32_f32(vabsq_f32(v)));
        }
    }
    float total() const {
        const uint32_t bits = vmaxvq_u32(acc);
        float f;
        memcpy(&f, &bits, sizeof(f));
        return f;
    }
};

static inline u8x32 round_to_i8(const f32x8 (&a)[4]) {
    const auto eight = [](f32x8 x) {
        return vmovn_s16(vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.v[0])), vmovn_s32(vcvtnq_s32_f32(x.v[1]))));
    };
    return {{vreinterpretq_u8_s8(vcombine_s8(eight(a[0]), eight(a[1]))),
             vreinterpretq_u8_s8(vcombine_s8(eight(a[2]), eight(a[3])))}};
}

static inline void sums_of_16(u8x32 q, int16_t * sums) {
    sums[0] = vaddlvq_s8(vreinterpretq_s8_u8(q.v[0]));
    sums[1] = vaddlvq_s8(vreinterpretq_s8_u8(q.v[1]));
}

struct sums_of_8 {
    int16x8_t acc[2] = {vdupq_n_s16(0), vdupq_n_s16(0)};
    void add(u8x32 q) { // eight vectors: two codes of each per sum
        for (int h = 0; h < 2; ++h) {
            acc[h] = vpadalq_s8(acc[h], vreinterpretq_s8_u8(q.v[h]));
        }
    }
    void total(float * sums) const {
        vst1q_f32(sums, vcvtq_f32_s32(vpaddq_s32(vpaddlq_s16(acc[0]), vpaddlq_s16(acc[1]))));
    }
};
