// AVX-512 with VBMI and VNNI, over avx2.h: u8x64 in one register. Included by simd.h inside namespace ggml_ext.

#define GGML_EXT_ISA "avx512"

struct u8x64 { __m512i v; };

static inline u8x64 load64(const uint8_t * p)          { return {_mm512_loadu_si512(p)}; }
static inline u8x64 join(u8x32 lo, u8x32 hi)           { return {_mm512_inserti64x4(_mm512_castsi256_si512(lo.v), hi.v, 1)}; }
static inline u8x32 low_half(u8x64 a)                  { return {_mm512_castsi512_si256(a.v)}; }
static inline u8x32 high_half(u8x64 a)                 { return {_mm512_extracti64x4_epi64(a.v, 1)}; }
static inline u8x64 operator|(u8x64 a, u8x64 b)        { return {_mm512_or_si512(a.v, b.v)}; }

// A constant that stays in its register: GCC makes some anew in every turn of a loop, by shuffles, of which there are few.
static inline __m512i keep(__m512i v) {
    __asm__("" : "+v"(v));
    return v;
}

// a where mask is set, else b
static inline __m512i select_bits(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(mask, a, b, 0xca); }

template <int S> static inline __m512i shift(u8x64 a) {
    return S > 0 ? _mm512_srli_epi16(a.v, S > 0 ? S : 0) : S < 0 ? _mm512_slli_epi16(a.v, S < 0 ? -S : 0) : a.v;
}
template <int S> static inline u8x64 field(u8x64 a, uint8_t mask) {
    return {_mm512_and_si512(shift<S>(a), _mm512_set1_epi8((char) mask))};
}
template <int S> static inline u8x64 funnel(u8x64 before, u8x64 a) {
    return {select_bits(keep(_mm512_set1_epi8((1 << S) - 1)), shift<8 - S>(before), shift<-S>(a))};
}

static inline u8x64 look_up(table16 t, u8x64 i) { return {_mm512_shuffle_epi8(_mm512_broadcast_i64x4(t.v), i.v)}; }

// Permutes of bytes look at six bits of an index: of a table of 16 four times over, at the low four. So no bits above a nibble
// have to be removed.
template <int S> static inline u8x64 nibble(u8x64 a)      { return {shift<S>(a)}; }
template <int S> static inline u8x64 high_nibble(u8x64 a) { return {shift<S - 4>(a)}; }

// One look-up gives both masks of a pair, for the index nibbles side by side in a byte.
static inline u8x64 trellis_values(const ggml_ext_trellis_tables & t, u8x64 a, u8x64 b, u8x64 e) {
    const auto table = [](const uint8_t * p) { return _mm_loadu_si128((const __m128i *) p); };
    const __m512i mix     = keep(_mm512_broadcast_i32x4(_mm_or_si128(table(t.mix[0]), _mm_slli_epi16(table(t.mix[1]), 4))));
    const __m512i values0 = keep(_mm512_broadcast_i32x4(table(t.values[0])));
    const __m512i values1 = keep(_mm512_broadcast_i32x4(table(t.values[1])));
    const __m512i i = _mm512_xor_si512(select_bits(keep(_mm512_set1_epi8(15)), a.v, e.v), _mm512_permutexvar_epi8(b.v, mix));
    return {_mm512_add_epi8(_mm512_permutexvar_epi8(i, values0), _mm512_permutexvar_epi8(_mm512_srli_epi16(i, 4), values1))};
}

// Sum of q*y over pairs of groups.
template <int Q_MAX> struct dot_sum64 {
    __m512i acc = _mm512_setzero_si512();
    void add(u8x64 q, const int8_t * y) { acc = _mm512_dpbusd_epi32(acc, q.v, _mm512_loadu_si512(y)); }
    void add(u8x64 q, const int8_t * y, const int8_t * y4) {
        acc = _mm512_dpbusd_epi32(acc, q.v, join(load((const uint8_t *) y), load((const uint8_t *) y4)).v);
    }
    i32_sum  total() const    { return {_mm256_add_epi32(_mm512_castsi512_si256(acc), _mm512_extracti64x4_epi64(acc, 1))}; }
    i32_sum4 quarters() const { return {total().v}; }
};
template <int Q_MAX> using quarter_dot_sum64 = dot_sum64<Q_MAX>;
