// AVX2, with VNNI if enabled. Included by simd.h inside namespace ggml_ext.

#if defined(GGML_EXT_AVX512)
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define GGML_EXT_ISA "avx2+vnni"
#else
#define GGML_EXT_ISA "avx2"
#endif

struct u8x32 { __m256i v; };

static inline u8x32 load(const uint8_t * p)      { return {_mm256_loadu_si256((const __m256i *) p)}; }
static inline void  store(uint8_t * p, u8x32 a)  { _mm256_storeu_si256((__m256i *) p, a.v); }
static inline u8x32 operator|(u8x32 a, u8x32 b)  { return {_mm256_or_si256(a.v, b.v)}; }
static inline u8x32 operator^(u8x32 a, u8x32 b)  { return {_mm256_xor_si256(a.v, b.v)}; }
static inline u8x32 operator+(u8x32 a, u8x32 b)  { return {_mm256_add_epi8(a.v, b.v)}; }

static inline u8x32 load_behind(uint8_t first, const uint8_t * p) {
    const __m256i a = _mm256_loadu_si256((const __m256i *) (p - 1));
#if defined(GGML_EXT_AVX512)
    return {_mm256_mask_set1_epi8(a, 1, (char) first)};
#else
    const __m256i byte0 = _mm256_zextsi128_si256(_mm_cvtsi32_si128(0xff));
    return {_mm256_or_si256(_mm256_andnot_si256(byte0, a), _mm256_zextsi128_si256(_mm_cvtsi32_si128(first)))};
#endif
}

static inline u8x32 load8x4(const uint8_t * p0, const uint8_t * p1, const uint8_t * p2, const uint8_t * p3) {
    const auto load_two = [](const uint8_t * p, const uint8_t * q) {
        return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *) p)), (const __m64 *) q));
    };
    return {_mm256_inserti128_si256(_mm256_castsi128_si256(load_two(p0, p1)), load_two(p2, p3), 1)};
}

static inline u8x32 words8(const uint32_t (&w)[8]) {
    return {_mm256_setr_epi32((int) w[0], (int) w[1], (int) w[2], (int) w[3], (int) w[4], (int) w[5], (int) w[6], (int) w[7])};
}

struct u8x16 { __m128i v; };

static inline u8x16 load16(const uint8_t * p)          { return {_mm_loadu_si128((const __m128i *) p)}; }
static inline u8x16 words4(const uint32_t (&w)[4])     { return {_mm_setr_epi32((int) w[0], (int) w[1], (int) w[2], (int) w[3])}; }
static inline u8x16 load16_behind(uint8_t first, const uint8_t * p) { return {_mm_insert_epi8(load16(p - 1).v, first, 0)}; }
static inline u8x32 spread_nibbles(u8x16 a, u8x16 b) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(b.v), 8), both = _mm256_or_si256(_mm256_cvtepu8_epi16(a.v), high);
    return {_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi16(0xff)), high)};
}

template <int N> static inline u8x32 first_of(u8x32 a) { return {_mm256_and_si256(a.v, N == 8 ? _mm256_set1_epi64x(0xff) : _mm256_set1_epi32(0xff))}; }
template <int N> static inline u8x32 shift_lanes(u8x32 a, u8x32 first) {
    return {_mm256_or_si256(N == 8 ? _mm256_slli_epi64(a.v, 8) : _mm256_slli_epi32(a.v, 8), first.v)};
}

// 16-bit shifts move bits of the neighbour byte in; the mask removes them.
template <int S> static inline u8x32 field(u8x32 a, uint8_t mask) {
    const __m256i t = S >= 0 ? _mm256_srli_epi16(a.v, S >= 0 ? S : 0) : _mm256_slli_epi16(a.v, S < 0 ? -S : 0);
    return {_mm256_and_si256(t, _mm256_set1_epi8((char) mask))};
}

// Bits of the neighbour byte stay above the nibble.
template <int S> static inline u8x32 shifted(u8x32 a) { return {S ? _mm256_srli_epi16(a.v, S) : a.v}; }

// 15-bit codes of the even and the odd bytes, in 16-bit lanes.
struct u15x32 { __m256i even, odd; };

template <int A, int B> static inline u15x32 multiply_add(u8x32 a) {
    static_assert(A >= 0 && A <= 127 && B >= 0 && 255*A + B < 1 << 15, "maddubs takes an int8 factor, codes have 15 bits");
    const __m256i b = _mm256_set1_epi16(B);
    return {_mm256_add_epi16(_mm256_maddubs_epi16(a.v, _mm256_set1_epi16(A)), b),
            _mm256_add_epi16(_mm256_maddubs_epi16(a.v, _mm256_set1_epi16(A << 8)), b)};
}

template <int S> static inline u8x32 field(u15x32 c) {
    const __m256i even = _mm256_srli_epi16(c.even, S);
    const __m256i odd  = S >= 8 ? _mm256_srli_epi16(c.odd, S >= 8 ? S - 8 : 0) : _mm256_slli_epi16(c.odd, S < 8 ? 8 - S : 0);
    const __m256i codes = _mm256_blendv_epi8(even, odd, _mm256_set1_epi16((int16_t) 0xff00));
    return {S + 6 < 15 ? _mm256_and_si256(codes, _mm256_set1_epi8(63)) : codes}; // the top six bits need no mask
}

static inline float half_to_float(ggml_half h) { return _cvtsh_ss(h); }

struct table16 { __m256i v; };

static inline table16 load_table(const uint8_t * p, uint8_t mask) {
    return {_mm256_broadcastsi128_si256(_mm_and_si128(_mm_loadl_epi64((const __m128i *) p), _mm_set1_epi8((char) mask)))};
}
static inline table16 load_table16(const uint8_t * p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) p))};
}
static inline u8x32 look_up(table16 t, u8x32 i) { return {_mm256_shuffle_epi8(t.v, i.v)}; }

// Scales of a block's quarters, each four times in 16-bit lanes, for madd after a permutation.
struct scales4 { __m256i v; };

static inline scales4 look_up_scales(uint32_t table, uint8_t indices) {
    const __m256i i = _mm256_srlv_epi64(_mm256_set1_epi8((char) indices), _mm256_setr_epi64x(0, 2, 4, 6));
    const __m256i s = _mm256_shuffle_epi8(_mm256_set1_epi32((int) table), _mm256_and_si256(i, _mm256_set1_epi16(3)));
    return {_mm256_and_si256(s, _mm256_set1_epi16(0x00ff))};
}

struct f32x4 { __m128 v; };

static inline f32x4 load4(const float * p)      { return {_mm_loadu_ps(p)}; }
static inline void  store4(float * p, f32x4 a)  { _mm_storeu_ps(p, a.v); }
static inline f32x4 operator*(f32x4 a, float b) { return {_mm_mul_ps(a.v, _mm_set1_ps(b))}; }
static inline f32x4 e5m3_to_float(uint8_t d0, uint8_t d1, uint8_t d2, uint8_t d3) {
    const __m128i d = _mm_cvtepu8_epi16(_mm_cvtsi32_si128((int) (d0 | d1 << 8 | d2 << 16 | (uint32_t) d3 << 24)));
    return {_mm_mul_ps(_mm_cvtph_ps(_mm_slli_epi16(d, 7)), _mm_set1_ps(GGML_EXT_E5M3_FACTOR))};
}

static inline float total(__m256 lanes) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

// Sums of two lanes.
static inline f32x4 quarters(__m256 lanes) {
    return {_mm_hadd_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1))};
}

// Two lanes per quarter of a block: its scale, or the sum of its activations.
static inline __m256 quarter_lanes(scales4 s) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(s.v, 16)); }
static inline __m256 quarter_lanes(const int16_t * bsums) {
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) bsums), _mm256_set1_epi16(1)));
}

#if !defined(GGML_EXT_AVX512)
// Eight partial sums, two per eight bytes.
struct i32_sum { __m256i v; };

// maddubs adds two products of unsigned and signed bytes in an int16.
template <int Q_MAX> static inline __m256i products(u8x32 q, const int8_t * y) {
    static_assert(2*Q_MAX*ACT_MAX <= INT16_MAX, "maddubs would saturate");
    return _mm256_maddubs_epi16(q.v, _mm256_loadu_si256((const __m256i *) y));
}

// Force the accumulation now: GCC would first compute the products of all columns, which do not fit the registers.
static inline __m256i keep(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}

// Sum of q*y over N_VECS vectors of codes 0..Q_MAX and activations.
template <int Q_MAX, int N_VECS> struct dot_sum {
    __m256i acc = _mm256_setzero_si256();
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    void add(u8x32 q, const int8_t * y) { acc = _mm256_dpbusd_epi32(acc, q.v, _mm256_loadu_si256((const __m256i *) y)); }
    i32_sum total() const { return {acc}; }
#elif defined(__AVXVNNI__)
    void add(u8x32 q, const int8_t * y) { acc = _mm256_dpbusd_avx_epi32(acc, q.v, _mm256_loadu_si256((const __m256i *) y)); }
    i32_sum total() const { return {acc}; }
#else
    static constexpr bool fits_i16 = 2*Q_MAX*ACT_MAX*N_VECS <= INT16_MAX; // N_VECS sums in one accumulator
    void add(u8x32 q, const int8_t * y) {
        const __m256i p = products<Q_MAX>(q, y);
        acc = keep(fits_i16 ? _mm256_add_epi16(acc, p)
                            : _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1))));
    }
    i32_sum total() const { return {fits_i16 ? _mm256_madd_epi16(acc, _mm256_set1_epi16(1)) : acc}; }
#endif
};
template <int Q_MAX> using quarter_dot_sum = dot_sum<Q_MAX, 8>;

// The same over a block, with a scale per quarter.
template <int K> static inline __m256i quarter_scale(scales4 s) { return _mm256_permute4x64_epi64(s.v, 0x55*K); }

template <int Q_MAX> struct scaled_dot_sum {
    static_assert(4*Q_MAX*ACT_MAX <= INT16_MAX, "two vectors share one int16 accumulator");
    __m256i acc = _mm256_setzero_si256();
    void add(u8x32 q0, u8x32 q1, __m256i scale, const int8_t * y) {
        const __m256i p = _mm256_add_epi16(products<Q_MAX>(q0, y), products<Q_MAX>(q1, y + 32));
        acc = keep(_mm256_add_epi32(acc, _mm256_madd_epi16(p, scale)));
    }
    i32_sum total() const { return {acc}; }
};

// Floats for the lanes of an i32_sum.
constexpr int N_LANES = 8;
struct f32_lanes { __m256 v; };

static inline f32_lanes operator*(f32_lanes a, float b) { return {_mm256_mul_ps(a.v, _mm256_set1_ps(b))}; }
static inline f32_lanes spread(float a) {
    f32_lanes r = {_mm256_set1_ps(a)};
    __asm__("" : "+x"(r.v)); // else GCC multiplies by another scalar before it spreads both
    return r;
}
static inline f32_lanes spread(f32x4 a) {
    return {_mm256_permutevar8x32_ps(_mm256_castps128_ps256(a.v), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))};
}
static inline f32_lanes spread(scales4 s)                { return {quarter_lanes(s)}; }
static inline f32_lanes lane_sums(const int16_t * bsums) { return {quarter_lanes(bsums)}; }

struct f32_sum {
    __m256 acc = _mm256_setzero_ps();
    void  add(f32_lanes scale, i32_sum sum, f32_lanes a, f32_lanes b) {
        acc = _mm256_fmadd_ps(scale.v, _mm256_fmadd_ps(a.v, b.v, _mm256_cvtepi32_ps(sum.v)), acc);
    }
    float total() const    { return ggml_ext::total(acc); }
    f32x4 quarters() const { return ggml_ext::quarters(acc); }
};
#endif

// --- activations ---

struct f32x8 { __m256 v; };

static inline f32x8 load(const float * p)        { return {_mm256_loadu_ps(p)}; }
static inline void  store(float * p, f32x8 a)    { _mm256_storeu_ps(p, a.v); }
static inline f32x8 operator+(f32x8 a, f32x8 b)  { return {_mm256_add_ps(a.v, b.v)}; }
static inline f32x8 operator-(f32x8 a, f32x8 b)  { return {_mm256_sub_ps(a.v, b.v)}; }
static inline f32x8 operator*(f32x8 a, f32x8 b)  { return {_mm256_mul_ps(a.v, b.v)}; }
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

// packs works in 128-bit lanes: the permutation restores the order.
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

struct sums_of_8 {
    __m256i acc = _mm256_set1_epi64x(-8*8*128);
    // eight vectors
    void add(u8x32 q) {
        acc = _mm256_add_epi64(acc, _mm256_sad_epu8(_mm256_xor_si256(q.v, _mm256_set1_epi8((char) 0x80)), _mm256_setzero_si256()));
    }
    void total(float * sums) const {
        const __m256i low = _mm256_permutevar8x32_epi32(acc, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
        _mm_storeu_ps(sums, _mm_cvtepi32_ps(_mm256_castsi256_si128(low)));
    }
};
