// AVX2, with VNNI where it is compiled in. Included by simd.h inside namespace ggml_ext.

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define GGML_EXT_ISA "avx2+vnni"
#else
#define GGML_EXT_ISA "avx2"
#endif

struct u8x32 { __m256i v; };

static inline u8x32 load(const uint8_t * p)      { return {_mm256_loadu_si256((const __m256i *) p)}; }
static inline void  store(uint8_t * p, u8x32 a)  { _mm256_storeu_si256((__m256i *) p, a.v); }
static inline u8x32 operator|(u8x32 a, u8x32 b)  { return {_mm256_or_si256(a.v, b.v)}; }

// 16-bit shifts let bits of the neighbour byte in; the mask removes them.
template <int S> static inline u8x32 field(u8x32 a, uint8_t mask) {
    const __m256i t = S >= 0 ? _mm256_srli_epi16(a.v, S >= 0 ? S : 0) : _mm256_slli_epi16(a.v, S < 0 ? -S : 0);
    return {_mm256_and_si256(t, _mm256_set1_epi8((char) mask))};
}

// 15-bit codes of the even and of the odd bytes, in 16-bit lanes
struct u15x32 { __m256i even, odd; };

template <int A, int B> static inline u15x32 multiply_add(u8x32 a) {
    static_assert(A >= 0 && A <= 127 && B >= 0 && 255*A + B < 1 << 15, "maddubs takes an int8 factor, codes have 15 bits");
    const __m256i b = _mm256_set1_epi16(B);
    return {_mm256_add_epi16(_mm256_maddubs_epi16(a.v, _mm256_set1_epi16(A)), b),
            _mm256_add_epi16(_mm256_maddubs_epi16(a.v, _mm256_set1_epi16(A << 8)), b)};
}

template <int S> static inline u8x32 field(u15x32 c) {
    __m256i even = _mm256_srli_epi16(c.even, S);
    if (S + 6 < 15) {
        even = _mm256_and_si256(even, _mm256_set1_epi16(0x003f));
    }
    const __m256i odd = S >= 8 ? _mm256_srli_epi16(c.odd, S >= 8 ? S - 8 : 0) : _mm256_slli_epi16(c.odd, S < 8 ? 8 - S : 0);
    return {_mm256_or_si256(even, _mm256_and_si256(odd, _mm256_set1_epi16(0x3f00)))};
}

static inline float half_to_float(ggml_half h) { return _cvtsh_ss(h); }

struct table8x8 { __m256i v; };

static inline table8x8 load_table(const uint8_t * p, uint8_t mask) {
    return {_mm256_broadcastsi128_si256(_mm_and_si128(_mm_loadl_epi64((const __m128i *) p), _mm_set1_epi8((char) mask)))};
}
static inline u8x32 look_up(table8x8 t, u8x32 i) { return {_mm256_shuffle_epi8(t.v, i.v)}; }

// Eight partial sums.
struct i32_sum { __m256i v = _mm256_setzero_si256(); };

// Sum of q*y over N_VECS vectors of codes 0..Q_MAX against activations.
template <int Q_MAX, int N_VECS> struct dot_sum {
    static_assert(2*Q_MAX*ACT_MAX <= INT16_MAX, "maddubs, which adds two products in an int16, would saturate");
    __m256i acc = _mm256_setzero_si256();
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
    void add(u8x32 q, const int8_t * y) {
        const __m256i vy = _mm256_loadu_si256((const __m256i *) y);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        acc = _mm256_dpbusd_epi32(acc, q.v, vy);
#else
        acc = _mm256_dpbusd_avx_epi32(acc, q.v, vy);
#endif
    }
    i32_sum times(int scale) const { return {_mm256_mullo_epi32(acc, _mm256_set1_epi32(scale))}; }
    i32_sum total() const          { return {acc}; }
#else
    static constexpr bool fits_i16 = 2*Q_MAX*ACT_MAX*N_VECS <= INT16_MAX; // of N_VECS sums in one accumulator
    void add(u8x32 q, const int8_t * y) {
        const __m256i p = _mm256_maddubs_epi16(q.v, _mm256_loadu_si256((const __m256i *) y));
        acc = fits_i16 ? _mm256_add_epi16(acc, p)
                       : _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
    }
    i32_sum times(int scale) const {
        return {fits_i16 ? _mm256_madd_epi16(acc, _mm256_set1_epi16((int16_t) scale))
                         : _mm256_mullo_epi32(acc, _mm256_set1_epi32(scale))};
    }
    i32_sum total() const { return fits_i16 ? times(1) : i32_sum{acc}; }
#endif
};

static inline i32_sum operator+(i32_sum a, i32_sum b) { return {_mm256_add_epi32(a.v, b.v)}; }

struct f32_sum {
    __m256 acc = _mm256_setzero_ps();
    void add(float scale, i32_sum sum) { acc = _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(sum.v), acc); }
    float total() const {
        __m128 a = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
        a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
    }
};

// Sum of a block's activation codes, from its 16 partial sums; of each quarter times its scale.
static inline i32_sum activation_sum(const int16_t * bsums) {
    return {_mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) bsums), _mm256_set1_epi16(1))};
}
static inline i32_sum activation_sum(const int16_t * bsums, int s0, int s1, int s2, int s3) {
    constexpr int64_t four = 0x0001000100010001;
    return {_mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) bsums), _mm256_set_epi64x(four*s3, four*s2, four*s1, four*s0))};
}
