// The trellis code of types/trellis.h over the SIMD primitives: of one block of 256, or of up to four blocks of 64 at a time.
#pragma once

#include "unpack.h"

#include <cstddef>

namespace ggml_ext {

// What the indices are made of; lane: a byte of a group.
struct trellis_lanes {
    u8x64 ql;             // low bits of the groups 0 to 3 and 4 to 7
    u8x64 before;         // those of the four groups before: 4 to 7 of the lane before, and 0 to 3
    u8x64 before2;        // those before them: 0 to 3 and 4 to 7 of the lane before. For K = 2 alone
    u8x64 high;           // high bits: four groups before, and four. For K = 3 alone
};

// Of the blocks p[0] to p[3] of 64 weights.
template <int K, typename B> static inline trellis_lanes load_trellis_at(const B * const (&p)[GGML_EXT_GROUP_BLOCKS]) {
    const auto bytes = [&](size_t at) {
        const auto byte = [&](int b) { return (const uint8_t *) p[b] + at; };
        return load8x4(byte(0), byte(1), byte(2), byte(3));
    };
    const u8x32 ql0 = bytes(offsetof(B, ql)), ql1 = bytes(offsetof(B, ql) + 8);
    const u8x32 start = first_of_8(bytes(offsetof(B, start)));
    trellis_lanes t;
    t.ql     = join(ql0, ql1);
    t.before = join(shift_lanes8(ql1, start), ql0);
    if constexpr (K == 2) {
        t.before2 = join(shift_lanes8(ql0, u8x32()), low_half(t.before));
    } else {
        const u8x32 h = bytes(offsetof(B, qh));
        t.high = join(funnel<4>(shift_lanes8(h, field<-6>(start, 0xc0)), h), h);
    }
    return t;
}

#if defined(GGML_EXT_AVX512)
// Where the bytes of a word lie in a block of 256 or in four of 64: among the 64 bytes at their beginning or, what is behind
// those, among the 64 at their end.
template <typename B> struct picked_bytes {
    alignas(64) uint8_t at[64] = {};

    // offset(i, half): where in a block byte i of its L in a half is
    template <typename F> constexpr explicit picked_bytes(F offset) {
        constexpr int L = traits<B>::block_size/8;
        for (int j = 0; j < 64; ++j) {
            const int byte = (int) sizeof(B)*(j%32/L) + offset(j%L, j/32);
            at[j] = (uint8_t) (byte < 64 ? byte : byte - group_blocks<B>*(int) sizeof(B) + 128);
        }
    }
    __m512i pick(__m512i begin, __m512i end) const { return _mm512_permutex2var_epi8(begin, keep(_mm512_load_si512(at)), end); }
};

// The block at x, or the four at x.
template <int K, typename B> static inline trellis_lanes load_trellis(const B * x) {
    constexpr int L = traits<B>::block_size/8, START = offsetof(B, start), QL = offsetof(B, ql);
    static constexpr picked_bytes<B> ql    ([](int i, int half) { return QL + L*half + i; });
    static constexpr picked_bytes<B> before([](int i, int half) { return half ? QL + i : i ? QL + L - 1 + i : START; });
    const __m512i begin = _mm512_loadu_si512(x), end = _mm512_loadu_si512((const char *) (x + group_blocks<B>) - 64);
    const __m256i lane0 = L == 8 ? _mm256_set1_epi64x(0xff) : _mm256_zextsi128_si256(_mm_cvtsi32_si128(0xff));
    const __m512i first = keep(_mm512_zextsi256_si512(lane0)); // of the low half's blocks
    trellis_lanes t;
    t.ql     = {L == 32 ? _mm512_loadu_si512(x->ql) : ql.pick(begin, end)};
    t.before = {before.pick(begin, end)};
    if constexpr (K == 2) {
        static constexpr picked_bytes<B> before2([](int i, int half) { return i ? QL + L*half - 1 + i : START; });
        t.before2 = {_mm512_andnot_si512(first, before2.pick(begin, end))};
    } else {
        constexpr int QH = offsetof(B, qh);
        static constexpr picked_bytes<B> high       ([](int i, int) { return QH + i; });
        static constexpr picked_bytes<B> high_before([](int i, int half) { return half ? QH + i : i ? QH - 1 + i : START; });
        // as funnel<4> in the low half; in its lane 0 the start's two bits take the place of the lane before
        const __m512i nibble  = keep(_mm512_inserti64x4(_mm512_set1_epi8(-1), _mm256_set1_epi8(15), 0));
        const __m512i by      = keep(_mm512_zextsi256_si512(_mm256_set1_epi16(4)));
        const __m512i shifted = _mm512_srlv_epi16(high_before.pick(begin, end), by);
        const __m512i funnels = select_bits(nibble, shifted, _mm512_slli_epi16(high.pick(begin, end), 4));
        t.high = {select_bits(_mm512_and_si512(first, nibble), _mm512_slli_epi16(t.before.v, 2), funnels)};
    }
    return t;
}
#else
template <int K, typename B> static inline trellis_lanes load_trellis(const B * x) {
    if constexpr (traits<B>::block_size == 64) {
        const B * const p[GGML_EXT_GROUP_BLOCKS] = {x, x + 1, x + 2, x + 3};
        return load_trellis_at<K>(p);
    } else {
        trellis_lanes t;
        t.ql     = load64(x->ql);
        t.before = join(shift_lanes(load(x->ql + 32), x->start), load(x->ql));
        if constexpr (K == 2) {
            t.before2 = join(shift_lanes(load(x->ql), 0), low_half(t.before));
        } else {
            const u8x32 h = load(x->qh);
            t.high = join(funnel<4>(shift_lanes(h, (uint8_t) (x->start << 6)), h), h);
        }
        return t;
    }
}
#endif

// The pairs of low bits of the groups G and G + 4: a field of these words at pair_shift(G). A negative G is G + 8 of the lane
// before.
template <int G> static inline u8x64 pair_word(const trellis_lanes & t) {
    if constexpr      (G == -4) { return funnel<2>(t.before2, t.before); }
    else if constexpr (G <   0) { return t.before; }
    else if constexpr (G ==  0) { return funnel<2>(t.before, t.ql); }
    else                        { return t.ql; }
}
constexpr int pair_shift(int g) { return g % 4 == 0 ? 0 : g < 0 ? 2*(g + 3) : 2*(g - 1); }

// Codes of the groups G and G + 4.
template <int K, int G> static inline u8x64 trellis_groups(const ggml_ext_trellis_tables & tables, const trellis_lanes & t) {
    const u8x64 pair2 = pair_word<G - 2>(t);
    if constexpr (K == 3) {
        return trellis_values(tables, nibble<pair_shift(G - 2)>(pair2), nibble<pair_shift(G)>(pair_word<G>(t)),
                              high_nibble<G + 1>(t.high));
    } else {
        return trellis_values(tables, nibble<pair_shift(G)>(pair_word<G>(t)), nibble<pair_shift(G - 4)>(pair_word<G - 4>(t)),
                              high_nibble<pair_shift(G - 2)>(pair2));
    }
}

// The unpackers: of a block of 256, and of four blocks of 64, one after the other or anywhere.
#define GGML_EXT_TRELLIS_UNPACKER(NAME, name, K)                                                                     \
    template <> struct unpacker<block_##name> {                                                                      \
        trellis_lanes lanes;                                                                                         \
        float         d;                                                                                             \
        static constexpr float offset = GGML_EXT_##NAME##_TRELLIS_OFFSET;                                            \
        explicit unpacker(const block_##name * x) : lanes(load_trellis<K>(x)), d(e5m3_to_float(x->d)) {}             \
        template <int G> u8x64 groups() const { return trellis_groups<K, G>(ggml_ext_##name##_tables, lanes); }      \
    };

#define GGML_EXT_TRELLIS_UNPACKER64(NAME, name, K)                                                                   \
    template <> struct unpacker<block_##name> {                                                                      \
        trellis_lanes lanes;                                                                                         \
        f32x4         d;                                                                                             \
        static constexpr float offset = GGML_EXT_##NAME##_TRELLIS_OFFSET;                                            \
        explicit unpacker(const block_##name * x)                                                                    \
            : lanes(load_trellis<K>(x)), d(e5m3_to_float(x[0].d, x[1].d, x[2].d, x[3].d)) {}                         \
        explicit unpacker(const block_##name * const (&p)[GGML_EXT_GROUP_BLOCKS])                                    \
            : lanes(load_trellis_at<K>(p)), d(e5m3_to_float(p[0]->d, p[1]->d, p[2]->d, p[3]->d)) {}                     \
        template <int G> u8x64 groups() const { return trellis_groups<K, G>(ggml_ext_##name##_tables, lanes); }      \
    };

} // namespace ggml_ext
