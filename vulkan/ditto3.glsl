// DITTO3 (types/ditto3.h). The codebook is two words of four bytes: one bit of an index selects the word, two bits the byte.
struct ext_words { uint low[2], high, codebook, difference; float d; }; // codebook: first word; difference: its XOR with the second
#define EXT_OFFSET

ext_words ext_add_codebook(const uint ib, const uint low[2], const uint high) {
    const uint first = ext_word(ib, 2) & 0x7f7f7f7f, second = ext_word(ib, 6) & 0x7f7f7f7f;
    return ext_words(low, high, first, first ^ second, ext_half_to_float(ext_half(ib, 0)));
}
ext_words ext_load(const uint ib, const uint k) {
    return ext_add_codebook(ib, uint[2](ext_word(ib, 10 + 4*k), ext_word(ib, 42 + 4*k)), ext_word(ib, 74 + 4*k));
}
ext_words ext_load_lane(const uint ib, const uint c) {
    return ext_add_codebook(ib, uint[2](ext_byte(ib, 10 + c), ext_byte(ib, 42 + c)), ext_byte(ib, 74 + c));
}
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
float ext_scale(const ext_words w) { return w.d; }
float ext_offset(const ext_words w) { return 64.0; }
