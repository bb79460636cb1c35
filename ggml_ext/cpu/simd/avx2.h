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

static inline float half_to_float(ggml_half h) { return _cvtsh_ss(h); }

struct table8x8 { __m256i v; };

static inline table8x8 load_table(const int8_t * p) {
    return {_mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *) p))};
}
static inline u8x32 look_up(table8x8 t, u8x32 i) { return {_mm256_shuffle_epi8(t.v, i.v)}; }

// Sum of q*y over N_VECS vectors of codes against activations, as eight int32 lanes. Codes are Q_MIN..Q_MAX, either
// unsigned 7-bit or signed; the multiply-adds take an unsigned and a signed byte, so that of signed codes the magnitude
// is taken (128 as an unsigned byte is right) and the sign given to the activation.
template <int Q_MIN, int Q_MAX, int N_VECS> struct dot_sum {
    static_assert(Q_MIN >= -128 && Q_MAX <= 127, "codes are bytes");
    static __m256i unsigned_part(__m256i q)         { return Q_MIN < 0 ? _mm256_sign_epi8(q, q) : q; }
    static __m256i signed_part(__m256i q, __m256i y) { return Q_MIN < 0 ? _mm256_sign_epi8(y, q) : y; }
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
    __m256i acc = _mm256_setzero_si256();
    void add(u8x32 q, const int8_t * y) {
        const __m256i vy = signed_part(q.v, _mm256_loadu_si256((const __m256i *) y));
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        acc = _mm256_dpbusd_epi32(acc, unsigned_part(q.v), vy);
#else
        acc = _mm256_dpbusd_avx_epi32(acc, unsigned_part(q.v), vy);
#endif
    }
    __m256i total() const { return acc; }
#else
    // maddubs adds two products in an int16; N_VECS of them may share one accumulator if they cannot saturate it
    static constexpr int  magnitude = Q_MAX > -Q_MIN ? Q_MAX : -Q_MIN;
    static constexpr bool fits_i16  = 2*magnitude*ACT_MAX*N_VECS <= INT16_MAX;
    static_assert(2*magnitude*ACT_MAX <= INT16_MAX, "maddubs would saturate");
    __m256i acc = _mm256_setzero_si256();
    void add(u8x32 q, const int8_t * y) {
        const __m256i p = _mm256_maddubs_epi16(unsigned_part(q.v), signed_part(q.v, _mm256_loadu_si256((const __m256i *) y)));
        acc = fits_i16 ? _mm256_add_epi16(acc, p)
                       : _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
    }
    __m256i total() const { return fits_i16 ? _mm256_madd_epi16(acc, _mm256_set1_epi16(1)) : acc; }
#endif
};

struct f32_sum {
    __m256 acc = _mm256_setzero_ps();
    void add(float scale, __m256i sum) { acc = _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(sum), acc); }
    float total() const {
        __m128 a = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
        a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
    }
};

// Sum of a block's 256 activation codes from its 16 partial sums.
static inline __m256i activation_sum(const int16_t * bsums) {
    return _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) bsums), _mm256_set1_epi16(1));
}

// --- activations ---

struct f32x8 { __m256 v; };

static inline f32x8 load(const float * p)        { return {_mm256_loadu_ps(p)}; }
static inline void  store(float * p, f32x8 a)    { _mm256_storeu_ps(p, a.v); }
static inline f32x8 operator+(f32x8 a, f32x8 b)  { return {_mm256_add_ps(a.v, b.v)}; }
static inline f32x8 operator-(f32x8 a, f32x8 b)  { return {_mm256_sub_ps(a.v, b.v)}; }
static inline f32x8 operator*(f32x8 a, float b)  { return {_mm256_mul_ps(a.v, _mm256_set1_ps(b))}; }

// swapped + (a with the second of each pair negated) = (u + v, u - v)
template <int STRIDE> static inline f32x8 butterfly(f32x8 a) {
    const __m256i neg = STRIDE == 1 ? _mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN)
                      : STRIDE == 2 ? _mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN)
                                    : _mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN);
    const __m256 swapped = STRIDE == 1 ? _mm256_permute_ps(a.v, 0xB1)
                         : STRIDE == 2 ? _mm256_permute_ps(a.v, 0x4E)
                                       : _mm256_permute2f128_ps(a.v, a.v, 1);
    return {_mm256_add_ps(swapped, _mm256_xor_ps(a.v, _mm256_castsi256_ps(neg)))};
}

struct magnitude_max {
    __m256i acc = _mm256_setzero_si256();
    void add(f32x8 a) {
        acc = _mm256_max_epu32(acc, _mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(INT32_MAX)));
    }
    float total() const {
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
        return _mm_cvtss_f32(_mm_castsi128_ps(m));
    }
};

// packs work in 128-bit lanes: the permutation puts the 32 codes back in order
static inline u8x32 round_to_i8(const f32x8 (&a)[4]) {
    const __m256i a01 = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0].v), _mm256_cvtps_epi32(a[1].v));
    const __m256i a23 = _mm256_packs_epi32(_mm256_cvtps_epi32(a[2].v), _mm256_cvtps_epi32(a[3].v));
    return {_mm256_permutevar8x32_epi32(_mm256_packs_epi16(a01, a23), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))};
}

static inline void sums_of_16(u8x32 q, int16_t * sums) {
    const __m256i s = _mm256_sad_epu8(_mm256_xor_si256(q.v, _mm256_set1_epi8((char) 0x80)), _mm256_setzero_si256());
    sums[0] = (int16_t) (_mm256_extract_epi64(s, 0) + _mm256_extract_epi64(s, 1) - 16*128);
    sums[1] = (int16_t) (_mm256_extract_epi64(s, 2) + _mm256_extract_epi64(s, 3) - 16*128);
}
