// AVX-512 with VBMI and VNNI, on top of avx2.h: u8x64 in one register. Included by simd.h inside namespace ggml_ext.

#if defined(GGML_EXT_AMX)
#define GGML_EXT_ISA "avx512+amx" // AMX in the GEMM alone, if the system grants it
#else
#define GGML_EXT_ISA "avx512"
#endif

struct u8x64 { __m512i v; };

static inline u8x64 join(u8x32 lo, u8x32 hi)           { return {_mm512_inserti64x4(_mm512_castsi256_si512(lo.v), hi.v, 1)}; }
static inline u8x32 low_half(u8x64 a)                  { return {_mm512_castsi512_si256(a.v)}; }
static inline u8x32 high_half(u8x64 a)                 { return {_mm512_extracti64x4_epi64(a.v, 1)}; }
static inline u8x64 operator|(u8x64 a, u8x64 b)        { return {_mm512_or_si512(a.v, b.v)}; }
static inline u8x64 operator^(u8x64 a, u8x64 b)        { return {_mm512_xor_si512(a.v, b.v)}; }
static inline u8x64 xor3(u8x64 a, u8x64 b, u8x64 c)    { return {_mm512_ternarylogic_epi64(a.v, b.v, c.v, 0x96)}; }

// Keep v in a register. GCC rebuilds some constants in every iteration with shuffles, or reloads them for every use; both are slow.
static inline __m512i keep(__m512i v) {
    __asm__("" : "+v"(v));
    return v;
}

static inline u8x64 load64(const uint8_t * p) { return {keep(_mm512_loadu_si512(p))}; }

// a where mask is set, else b
static inline __m512i select_bits(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(mask, a, b, 0xca); }

template <int S> static inline __m512i shift(u8x64 a) {
    return S > 0 ? _mm512_srli_epi16(a.v, S > 0 ? S : 0) : S < 0 ? _mm512_slli_epi16(a.v, S < 0 ? -S : 0) : a.v;
}
template <int S> static inline u8x64 field(u8x64 a, uint8_t mask) {
    return {_mm512_and_si512(shift<S>(a), _mm512_set1_epi8((char) mask))};
}
template <int S> static inline u8x64 funnel(u8x64 previous, u8x64 a) {
    return {select_bits(keep(_mm512_set1_epi8((1 << S) - 1)), shift<8 - S>(previous), shift<-S>(a))};
}

static inline u8x64 look_up(table16 t, u8x64 i) { return {_mm512_shuffle_epi8(_mm512_broadcast_i64x4(t.v), i.v)}; }

template <int S> static inline u8x64 shifted(u8x64 a) { return {shift<S>(a)}; }

// Byte permutes use six index bits. A table of 16, repeated four times, makes the upper two irrelevant, so no mask is needed.
static inline u8x64 trellis_values(const ggml_ext_trellis_tables & t, u8x64 i0, u8x64 i1, int first = 0) {
    const auto table = [](const uint8_t * p) { return keep(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) p))); };
    return {_mm512_add_epi8(_mm512_permutexvar_epi8(i0.v, table(t.values[first])), _mm512_permutexvar_epi8(i1.v, table(t.values[first + 1])))};
}

// Sixteen partial sums; each half has two per eight bytes.
struct i32_sum { __m512i v; };

// Sum of q*y over pairs of groups.
template <int Q_MAX> struct dot_sum64 {
    __m512i acc = _mm512_setzero_si512();
    void    add(u8x64 q, const int8_t * y) { acc = _mm512_dpbusd_epi32(acc, q.v, _mm512_loadu_si512(y)); }
    i32_sum total() const                  { return {acc}; }
};
template <int Q_MAX> using quarter_dot_sum64 = dot_sum64<Q_MAX>;

template <int K> static inline __m512i quarter_scale(scales4 s) {
    return _mm512_permutexvar_epi64(_mm512_set1_epi64(K), _mm512_castsi256_si512(s.v));
}
template <int Q_MAX> struct scaled_dot_sum64 {
    static_assert(2*Q_MAX*ACT_MAX <= INT16_MAX, "maddubs would saturate");
    __m512i acc = _mm512_setzero_si512();
    void    add(u8x64 q, __m512i scale, const int8_t * y) {
        acc = keep(_mm512_dpwssd_epi32(acc, _mm512_maddubs_epi16(q.v, _mm512_loadu_si512(y)), scale));
    }
    i32_sum total() const { return {acc}; }
};

// Floats for the lanes of an i32_sum; eight lanes are in the low half.
constexpr int N_LANES = 16;
struct f32_lanes { __m512 v; };

static inline f32_lanes operator*(f32_lanes a, float b)  { return {_mm512_mul_ps(a.v, _mm512_set1_ps(b))}; }
static inline f32_lanes spread(float a)                  { return {_mm512_castsi512_ps(keep(_mm512_castps_si512(_mm512_set1_ps(a))))}; }
static inline f32_lanes spread(f32x4 a) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    return {_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(a.v))};
}
static inline f32_lanes spread(scales4 s)                { return {_mm512_zextps256_ps512(quarter_lanes(s))}; }
static inline f32_lanes lane_sums(const int16_t * bsums) { return {_mm512_zextps256_ps512(quarter_lanes(bsums))}; }

struct f32_sum {
    __m512 acc = _mm512_setzero_ps();
    void  add(f32_lanes scale, i32_sum sum, f32_lanes a, f32_lanes b) {
        acc = _mm512_fmadd_ps(scale.v, _mm512_fmadd_ps(a.v, b.v, _mm512_cvtepi32_ps(sum.v)), acc);
    }
    __m256 halves() const {
        return _mm256_add_ps(_mm512_castps512_ps256(acc), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(acc), 1)));
    }
    float total() const    { return ggml_ext::total(halves()); }
    f32x4 quarters() const { return ggml_ext::quarters(halves()); }
};
