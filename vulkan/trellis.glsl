// Vulkan unpack of the trellis types (ggml_ext/types/trellis.h), K = EXT_TRELLIS_K. The eight weights of byte b are consecutive steps. Their symbols
// and predecessors are one bit window: byte b - 1 of the last plane (`start` for b = 0), then byte b of all planes. The window's last 12 bits index a
// table of values. The index is, from the low bits on:
//   K = 4:  c[t-2], c[t-1], c[t]        K = 3:  pair(t-2), pair(t), quad(t)        K = 2:  pair(t-4), pair(t-2), pair(t)
// The table has code - offset as the bits of halves, which is exact and requires no 16-bit arithmetic.
const uint EXT_LANES = QUANT_K/8; // bytes per plane
#define NEEDS_INIT_IQ_SHMEM
shared uint16_t ext_table[4096];

// Indices with equal low bytes share one term of their code; the other term is one of 16 constants. So the loop does not index a constant array,
// which compilers turn into memory loads or hundreds of instructions.
void init_iq_shmem(const uvec3 workgroup) {
    for (uint i = gl_LocalInvocationIndex; i < 256; i += workgroup.x*workgroup.y*workgroup.z) {
        const uint n0 = i & 15, n1 = i >> 4; // low nibbles of the index
#if EXT_TRELLIS_K == 3
        const uint before = (n1 & 3) << 2 | n0 >> 2; // pair(t-1)
        const float first = float(ext_look_up(ext_trellis_values0, n0 ^ n1 ^ before)) - ext_trellis_offset;
        const uint  other = n1;
#define EXT_RUNNING ext_trellis_values1
#else
        const float first = float(ext_look_up(ext_trellis_values1, n1)) - ext_trellis_offset;
        const uint  other = n0;
#define EXT_RUNNING ext_trellis_values0
#endif
        [[unroll]] for (uint v = 0; v < 16; ++v) {
            const float value = first + float(ext_get_byte(EXT_RUNNING[v >> 2], v & 3));
            ext_table[i | (v ^ other) << 8] = uint16_t(packHalf2x16(vec2(value, 0.0)));
        }
    }
    barrier();
}
float ext_entry(const uint i) { return unpackHalf2x16(uint(ext_table[i])).x; }

// Returns the byte before word k of a plane, or `first` for k = 0. It loads in both cases, because a branch costs more.
uint ext_byte_before(const uint ib, const uint plane, const uint k, const uint first) {
    const uint previous = ext_half(ib, plane*EXT_LANES + 4*k) >> 8;
    return k == 0 ? first : previous;
}

#if EXT_TRELLIS_K == 2
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
#define EXT_INDEX(w, g, b) ((g < 4 ? w.windows[0][b] : w.windows[1][b]) >> 4*(g & 3) & 0xfff)
#endif

vec4 ext_values(const ext_words w, const uint g) {
    vec4 v;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        v[b] = ext_entry(EXT_INDEX(w, g, b));
    }
    return v;
}
float ext_scale(const ext_words w) { return w.d; }
