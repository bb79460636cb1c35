// Vulkan unpack of the trellis types (ggml_ext/types/trellis.h), K = EXT_TRELLIS_K, V = EXT_TRELLIS_V. Byte b of all planes holds the symbols of
// consecutive steps. A window has these symbols and, in its low bits, those before them: from the bytes before b, for b = 0 from `start`. The 12 bits
// that end with a step's symbol index a table. The index is, from the low bits on:
//   K = 4:  c[t-2], c[t-1], c[t]        K = 3:  pair(t-2), pair(t), quad(t)        K = 2:  pair(t-4), pair(t-2), pair(t)
// V = 1: the table has code - offset as the bits of halves, which is exact and requires no 16-bit arithmetic.
// V = 2: the table has both codes of a step as bytes, so that two weights take one look-up. The caller subtracts the offset.
// With EXT_INTEGER the table has code - offset as signed bytes: one, below a byte of zeros, or both.
const uint EXT_LANES = QUANT_K/8; // bytes per plane
#define NEEDS_INIT_IQ_SHMEM
shared uint16_t ext_table[4096];

#if EXT_TRELLIS_V == 1
#define EXT_TERMS(first, second) (first)
#else
#define EXT_TERMS(first, second) ((first) | (second) << 8)
#endif
#ifdef EXT_INTEGER
#define EXT_ENTRY(term, other)   (ext_centered((term) + (other), uint(ext_trellis_offset)) & (EXT_TRELLIS_V == 1 ? 0xff : 0xffff))
#elif EXT_TRELLIS_V == 1
#define EXT_ENTRY(term, other)   packHalf2x16(vec2(float(term) + (float(other) - ext_trellis_offset), 0.0))
float ext_value(const uint entry, const uint g) { return unpackHalf2x16(entry).x; }
#else
#define EXT_OFFSET
#define EXT_ENTRY(term, other)   ((term) + (other))
float ext_value(const uint entry, const uint g) { return float(entry >> 8*(g & 1) & 0xff); }
#endif

// Sixteen entries share one term of their codes; the other term is one of 16 constants. So the loop does not index a constant array, which
// compilers turn into memory loads or hundreds of instructions.
void init_iq_shmem(const uvec3 workgroup) {
    for (uint i = gl_LocalInvocationIndex; i < 256; i += workgroup.x*workgroup.y*workgroup.z) {
        const uint n0 = i & 15, n1 = i >> 4;
        // entry `first` ^ v*stride has i1 = v, or i0 = v for K = 4 and for K = 2, V = 1
#if EXT_TRELLIS_K == 3
        const uint i2 = n0 ^ n1, i0 = i2 ^ ((n1 & 3) << 2 | n0 >> 2), first = i | n1 << 8, stride = 0x100;
#elif EXT_TRELLIS_V == 2
        const uint i2 = n0, i0 = n1, first = i | (n0 ^ n1) << 8, stride = 0x111;
#else
        const uint i1 = n1, first = i | n0 << 8, stride = 0x100;
#endif
#if EXT_TRELLIS_K == 3 || EXT_TRELLIS_V == 2
        const uint term = EXT_TERMS(ext_look_up(ext_trellis_values0, i0), ext_look_up(ext_trellis_values2, i2));
#define EXT_OTHER(v) EXT_TERMS(ext_get_byte(ext_trellis_values1[v >> 2], v & 3), ext_get_byte(ext_trellis_values3[v >> 2], v & 3))
#else
        const uint term = ext_look_up(ext_trellis_values1, i1);
#define EXT_OTHER(v) ext_get_byte(ext_trellis_values0[v >> 2], v & 3)
#endif
        [[unroll]] for (uint v = 0; v < 16; ++v) {
            ext_table[first ^ v*stride] = uint16_t(EXT_ENTRY(term, EXT_OTHER(v)));
        }
    }
    barrier();
}

// Returns the byte before word k of a plane, or `first` for k = 0. It loads in both cases, because a branch costs more.
uint ext_byte_before(const uint ib, const uint plane, const uint k, const uint first) {
    const uint previous = ext_half(ib, plane*EXT_LANES + 4*k) >> 8;
    return k == 0 ? first : previous;
}
// Returns bytes c - 1 and c of a plane; byte -1 is `first`.
uint ext_two_bytes(const uint ib, const uint plane, const uint c, const uint first) {
    const uint offset = 2 + plane*EXT_LANES + c, last = ext_byte(ib, offset) & 0xff;
    return (c == 0 ? first : ext_byte(ib, offset - 1) & 0xff) | last << 8;
}

#if EXT_TRELLIS_V == 2
// bytes -2 ... 1 and 0 ... 3 of the low bits; high bits from step -16 on for K = 3
struct ext_words { uint low[2], high; float d; };

ext_words ext_load(const uint ib, const uint k) {
    ext_words w;
    const uint head = ext_half(ib, 0), low = ext_word(ib, 4*k); // `start` precedes the symbols
    w.low[0] = k == 0 ? low & 0xffffff00 : low;
    w.low[1] = low >> 16 | ext_half(ib, 4 + 4*k) << 16;
#if EXT_TRELLIS_K == 3
    const uint high = ext_word(ib, EXT_LANES + 2*k);
    w.high = k == 0 ? (high & 0xffff0000) | (head >> 8 & 3) << 14 : high;
#endif
    w.d = ext_e5m3(head & 0xff);
    return w;
}
ext_words ext_load_lane(const uint ib, const uint c) {
    ext_words w;
    const uint head = ext_half(ib, 0), low = ext_half(ib, c) >> 8*(c & 1) | ext_half(ib, c + 2) << (16 - 8*(c & 1));
    w.low[0] = c == 0 ? low & 0xffffff00 : low;
#if EXT_TRELLIS_K == 3
    const uint offset = 2 + EXT_LANES + c/2; // two lanes have a byte of high bits
    const uint before = c < 2 ? (head >> 8 & 3) << 6 : ext_byte(ib, offset - 1) & 0xff;
    w.high = (before | (ext_byte(ib, offset) & 0xff) << 8) << (8 - 4*(c & 1));
#endif
    w.d = ext_e5m3(head & 0xff);
    return w;
}
float ext_offset(const ext_words w) { return ext_trellis_offset; }
#if EXT_TRELLIS_K == 2
#define EXT_INDEX(w, t, b) bitfieldExtract(w.low[b/2], int(8*(b & 1) + 2*t + 6), 12)
#else
#define EXT_INDEX(w, t, b) (bitfieldExtract(w.low[b/2], int(8*(b & 1) + 2*t + 10), 8) | (w.high >> (4*b + t + 5) & 0xf00))
#endif

#elif EXT_TRELLIS_K == 2
struct ext_words { uint window[4]; float d; }; // from step -8 on

ext_words ext_load(const uint ib, const uint k) {
    ext_words w;
    const uint head = ext_half(ib, 0), l0 = ext_word(ib, 2 + 4*k), l1 = ext_word(ib, 2 + EXT_LANES + 4*k);
    const uint b0 = ext_byte_before(ib, 0, k, 0), b1 = ext_byte_before(ib, 1, k, head >> 8);
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        const uint before = b == 0 ? b0 | b1 << 8 : ext_get_byte(l0, b - 1) | ext_get_byte(l1, b - 1) << 8;
        w.window[b] = before | ext_get_byte(l0, b) << 16 | ext_get_byte(l1, b) << 24;
    }
    w.d = ext_e5m3(head & 0xff);
    return w;
}
ext_words ext_load_lane(const uint ib, const uint c) {
    ext_words w;
    const uint head = ext_half(ib, 0), low0 = ext_two_bytes(ib, 0, c, 0), low1 = ext_two_bytes(ib, 1, c, head >> 8);
    w.window[0] = (low0 & 0xff) | (low1 & 0xff) << 8 | (low0 & 0xff00) << 8 | (low1 & 0xff00) << 16;
    w.d = ext_e5m3(head & 0xff);
    return w;
}
#define EXT_INDEX(w, g, b) (w.window[b] >> 2*(g + 3) & 0xfff)

#elif EXT_TRELLIS_K == 3
// Returns two words of two 16-bit windows (bytes 0 and 2, bytes 1 and 3), each with a byte of `before` and of `word`.
uint[2] ext_windows(const uint before, const uint word) {
    return uint[2]((before & 0x00ff00ff) | (word & 0x00ff00ff) << 8, (before >> 8 & 0x00ff00ff) | (word & 0xff00ff00));
}
// low bits from step -4 on for groups 0-3, from step 0 on for the others; high bits from step -8 on
struct ext_words { uint low[2][2], high[2]; float d; };

ext_words ext_load(const uint ib, const uint k) {
    const uint head = ext_half(ib, 0), start = head >> 8;
    const uint l0 = ext_word(ib, 2 + 4*k), l1 = ext_word(ib, 2 + EXT_LANES + 4*k), h = ext_word(ib, 2 + 2*EXT_LANES + 4*k);
    const uint l1_before = l1 << 8 | ext_byte_before(ib, 1, k, start), h_before = h << 8 | ext_byte_before(ib, 2, k, (start & 3) << 6);
    return ext_words(uint[2][2](ext_windows(l1_before, l0), ext_windows(l0, l1)), ext_windows(h_before, h), ext_e5m3(head & 0xff));
}
ext_words ext_load_lane(const uint ib, const uint c) {
    ext_words w;
    const uint head = ext_half(ib, 0), start = head >> 8;
    const uint low0 = ext_byte(ib, 2 + c) & 0xff, low1 = ext_two_bytes(ib, 1, c, start);
    w.low[0][0] = (low1 & 0xff) | low0 << 8;
    w.low[1][0] = low0 | (low1 & 0xff00);
    w.high[0]   = ext_two_bytes(ib, 2, c, (start & 3) << 6);
    w.d = ext_e5m3(head & 0xff);
    return w;
}
// shifts high bits g - 3 ... g to bit 8
#define EXT_HIGH(word, b, g) (16*(b/2) + g < 3 ? (word) << (3 - g) : (word) >> (16*(b/2) + g - 3))
#define EXT_INDEX(w, g, b) (bitfieldExtract(w.low[g/4][b & 1], int(16*(b/2) + 2*((g & 3) + 1)), 8) | (EXT_HIGH(w.high[b & 1], b, g) & 0xf00))

#elif EXT_TRELLIS_K == 4
struct ext_words { uint windows[2][4]; float d; }; // from step -2 and from step 2 on

ext_words ext_load(const uint ib, const uint k) {
    ext_words w;
    const uint head = ext_half(ib, 0);
    uint l[4];
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        l[i] = ext_word(ib, 2 + i*EXT_LANES + 4*k);
    }
    const uint before = ext_byte_before(ib, 3, k, head >> 8);
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        const uint l1 = ext_get_byte(l[1], b), l2 = ext_get_byte(l[2], b);
        w.windows[0][b] = (b == 0 ? before : ext_get_byte(l[3], b - 1)) | ext_get_byte(l[0], b) << 8 | l1 << 16 | l2 << 24;
        w.windows[1][b] = l1 | l2 << 8 | ext_get_byte(l[3], b) << 16;
    }
    w.d = ext_e5m3(head & 0xff);
    return w;
}
ext_words ext_load_lane(const uint ib, const uint c) {
    ext_words w;
    const uint head = ext_half(ib, 0), l1 = ext_byte(ib, 2 + EXT_LANES + c) & 0xff, l2 = ext_byte(ib, 2 + 2*EXT_LANES + c) & 0xff;
    const uint l3 = ext_two_bytes(ib, 3, c, head >> 8), l12 = l1 | l2 << 8;
    w.windows[0][0] = (l3 & 0xff) | (ext_byte(ib, 2 + c) & 0xff) << 8 | l12 << 16;
    w.windows[1][0] = l12 | (l3 & 0xff00) << 8;
    w.d = ext_e5m3(head & 0xff);
    return w;
}
#define EXT_INDEX(w, g, b) ((g < 4 ? w.windows[0][b] : w.windows[1][b]) >> 4*(g & 3) & 0xfff)
#endif

#ifdef EXT_INTEGER
#define EXT_LOOK_UP(b) uint(ext_table[EXT_INDEX(w, (g/EXT_TRELLIS_V), b)])
int ext_ints(const ext_words w, const uint g) {
#if EXT_TRELLIS_V == 1
    return ext_pack(EXT_LOOK_UP(0), EXT_LOOK_UP(1), EXT_LOOK_UP(2), EXT_LOOK_UP(3));
#else
    const uint even = EXT_LOOK_UP(0) | EXT_LOOK_UP(2) << 16, odd = EXT_LOOK_UP(1) | EXT_LOOK_UP(3) << 16;
    return int(g % 2 == 0 ? (even & 0x00ff00ff) | (odd & 0x00ff00ff) << 8 : (even >> 8 & 0x00ff00ff) | (odd & 0xff00ff00));
#endif
}
#else
vec4 ext_values(const ext_words w, const uint g) {
    const uint t = g/EXT_TRELLIS_V; // step
    vec4 v;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        v[b] = ext_value(uint(ext_table[EXT_INDEX(w, t, b)]), g);
    }
    return v;
}
#endif
float ext_scale(const ext_words w) { return w.d; }
