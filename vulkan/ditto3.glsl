// DITTO3 (types/ditto3.h). The codebook is two words of four bytes: one bit of an index selects the word, two bits the byte.
#ifdef EXT_INTEGER
// Entries j and j + 1 in all four bytes of a word for even j: the first and their XOR. A binary tree of selections looks up four weights.
struct ext_words { uint low[2], high, first[4], difference[4]; float d; };
#else
#define EXT_OFFSET
struct ext_words { uint low[2], high, codebook, difference; float d; }; // codebook: first word; difference: its XOR with the second
#endif

ext_words ext_add_codebook(const uint ib, const uint low[2], const uint high) {
    const uint first = ext_word(ib, 2) & 0x7f7f7f7f, second = ext_word(ib, 6) & 0x7f7f7f7f;
    const float d = ext_half_to_float(ext_half(ib, 0));
#ifdef EXT_INTEGER
    ext_words w;
    w.low  = low;
    w.high = high;
    w.d    = d;
    [[unroll]] for (uint j = 0; j < 8; j += 2) {
        const uint word = ext_centered(j < 4 ? first : second, 64);
        w.first[j/2]      = ext_get_byte(word, j & 3)*0x01010101;
        w.difference[j/2] = ext_get_byte(word ^ word >> 8, j & 3)*0x01010101;
    }
    return w;
#else
    return ext_words(low, high, first, first ^ second, d);
#endif
}
ext_words ext_load(const uint ib, const uint k) {
    return ext_add_codebook(ib, uint[2](ext_word(ib, 10 + 4*k), ext_word(ib, 42 + 4*k)), ext_word(ib, 74 + 4*k));
}
ext_words ext_load_lane(const uint ib, const uint c) {
    return ext_add_codebook(ib, uint[2](ext_byte(ib, 10 + c), ext_byte(ib, 42 + c)), ext_byte(ib, 74 + c));
}
#ifdef EXT_INTEGER
uint ext_mask(const uint bits) { return (bits & 0x01010101)*255; }
uint ext_select(const uint mask, const uint zero, const uint one) { return zero ^ (mask & (zero ^ one)); }
int ext_ints(const ext_words w, const uint g) {
    const uint low = w.low[g/4] >> 2*(g & 3), m0 = ext_mask(low), m1 = ext_mask(low >> 1), m2 = ext_mask(w.high >> g);
    uint v[4];
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        v[j] = w.first[j] ^ (m0 & w.difference[j]);
    }
    return int(ext_select(m2, ext_select(m1, v[0], v[1]), ext_select(m1, v[2], v[3])));
}
#else
vec4 ext_values(const ext_words w, const uint g) {
    const uint low    = g < 4 ? w.low[0] : w.low[1];
    const uint shifts = ((g & 3) < 2 ? low << (3 - 2*(g & 3)) : low >> (2*(g & 3) - 3)) & 0x18181818; // to byte 0
    vec4 v;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        const uint second = uint(bitfieldExtract(int(w.high), int(8*b + g), 1)); // mask: all ones or zeros
        v[b] = float((w.codebook ^ (second & w.difference)) >> (shifts >> 8*b & 31) & 0xff);
    }
    return v;
}
#endif
float ext_scale(const ext_words w) { return w.d; }
float ext_offset(const ext_words w) { return 64.0; }
