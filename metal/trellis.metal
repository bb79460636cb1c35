// Metal unpack of the trellis types (types/trellis.h). The eight weights of byte c are those of consecutive steps. Their symbols and predecessors are
// one bit window: byte c - 1 of the last plane (`start` for c = 0), for K = V = 2 after byte c - 2, then byte c of all planes. The window's last
// 12 bits index a table of codes, which scripts/build/metal_library.py generates. The index is, from the low bits on:
//   K = 4:  c[t-2], c[t-1], c[t]        K = 3:  pair(t-2), pair(t), quad(t)        K = 2:  pair(t-4), pair(t-2), pair(t)
#include "codes.metal"

// Entries of the table. V = 1: codes in constant memory; half(code - offset), which is exact, in threadgroup memory. V = 2: both codes of a step as
// bytes, in either memory, so that two weights take one look-up.
template <int V> struct ggml_ext_trellis_table;
template <> struct ggml_ext_trellis_table<1> {
    typedef uint8_t code;
    typedef half    entry;
    static half make(uint8_t code, float offset) { return (half) ((float) code - offset); }
    static float value(uint8_t code, short g, float offset) {
        (void) g;
        return (float) code - offset;
    }
    static float value(half entry, short g, float offset) {
        (void) g;
        (void) offset;
        return (float) entry;
    }
};
template <> struct ggml_ext_trellis_table<2> {
    typedef ushort code;
    typedef ushort entry;
    static ushort make(ushort codes, float offset) {
        (void) offset;
        return codes;
    }
    static float value(ushort codes, short g, float offset) { return (float) (codes >> 8*(g%2) & 0xff) - offset; }
};

// L: bytes per plane of symbols. A window is plain data: a member with functions has no default constructor in the thread address space.
template <int K, int V, int L> struct ggml_ext_trellis_window;

// x: from step -2 on, y: from step 2 on
template <int L> struct ggml_ext_trellis_window<4, 1, L> {
    static uint2 load(uint8_t start, device const uint8_t * symbols, short c) {
        const uint before = c ? symbols[3*L + c - 1] : start;
        uint2 window;
        window.y = symbols[L + c] | (uint) symbols[2*L + c] << 8 | (uint) symbols[3*L + c] << 16;
        window.x = before | (uint) symbols[c] << 8 | window.y << 16;
        return window;
    }
    static ushort index(uint2 window, short g) {
        return (g < 4 ? window.x >> 4*g : window.y >> 4*(g - 4)) & 0xfff;
    }
};

// x: low bits from step -4 on, y: high bits from step -8 on, shifted left by 8
template <int L> struct ggml_ext_trellis_window<3, 1, L> {
    static uint2 load(uint8_t start, device const uint8_t * symbols, short c) {
        const uint low_before  = c ? symbols[L + c - 1] : start;
        const uint high_before = c ? symbols[2*L + c - 1] : (start & 3) << 6;
        uint2 window;
        window.x = low_before | (uint) symbols[c] << 8 | (uint) symbols[L + c] << 16;
        window.y = high_before << 8 | (uint) symbols[2*L + c] << 16;
        return window;
    }
    static ushort index(uint2 window, short g) {
        return (window.x >> 2*(g + 1) & 0xff) | (window.y >> (g + 5) & 0xf00);
    }
};

// x: from step -8 on
template <int L> struct ggml_ext_trellis_window<2, 1, L> {
    static uint2 load(uint8_t start, device const uint8_t * symbols, short c) {
        const uint before = c ? symbols[c - 1] | (uint) symbols[L + c - 1] << 8 : (uint) start << 8;
        uint2 window;
        window.x = before | (uint) symbols[c] << 16 | (uint) symbols[L + c] << 24;
        window.y = 0;
        return window;
    }
    static ushort index(uint2 window, short g) {
        return window.x >> 2*(g + 3) & 0xfff;
    }
};

// V = 2: four steps of one byte, with the windows of V = 1
template <int L> struct ggml_ext_trellis_window<3, 2, L> : ggml_ext_trellis_window<3, 1, L> {
    static uint2 load(uint8_t start, device const uint8_t * symbols, short c) {
        const uint low_before  = c ? symbols[c - 1] : start;
        const uint high_before = c ? symbols[L + (c - 1)/2] >> 4*((c - 1)%2) & 15 : (start & 3) << 2;
        uint2 window;
        window.x = low_before | (uint) symbols[c] << 8;
        window.y = high_before << 12 | (uint) (symbols[L + c/2] >> 4*(c%2) & 15) << 16;
        return window;
    }
};
template <int L> struct ggml_ext_trellis_window<2, 2, L> : ggml_ext_trellis_window<2, 1, L> {
    static uint2 load(uint8_t start, device const uint8_t * symbols, short c) {
        const uint before = c ? symbols[c - 1] : start, first = c > 1 ? symbols[c - 2] : c ? start : 0;
        uint2 window;
        window.x = first | before << 8 | (uint) symbols[c] << 16;
        window.y = 0;
        return window;
    }
};

#define GGML_EXT_X(NAME, name, K, V, N, CODE, OFFSET, ...)                                                 \
    struct block_##name {                                                                                  \
        uint8_t d, start, symbols[K*N/(8*V)];                                                              \
    };                                                                                                     \
    static_assert(sizeof(block_##name) == GGML_EXT_##NAME##_BLOCK_BYTES, "codes.h and the struct differ"); \
    template <> struct ggml_ext_unpacker<block_##name> {                                                   \
        enum { n = N, n_groups = 1, rotated = 1, has_table = 1 };                                          \
        typedef ggml_ext_trellis_table<V> table;                                                           \
        typedef ggml_ext_trellis_window<K, V, N/8> windows;                                                \
        uint2 window;                                                                                      \
        static constant const table::code * codes() { return ggml_ext_##CODE##_codes; }                    \
        static float offset() { return OFFSET; }                                                           \
        void load(device const block_##name & x, short c) { window = windows::load(x.start, x.symbols, c); } \
        template <typename T> float value(short g, T entries) const {                                      \
            return table::value(entries[windows::index(window, g/V)], g, offset());                        \
        }                                                                                                  \
        static float scale(device const block_##name & x, short g) {                                       \
            (void) g;                                                                                      \
            return ggml_ext_e5m3(x.d);                                                                     \
        }                                                                                                  \
    };
GGML_EXT_TRELLIS_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
