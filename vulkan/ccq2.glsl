// CCQ2 (types/ccq2.h). The 15-bit code of a byte holds four weights of four groups.
struct ext_words { uint codes[2], scales; float d; };

ext_words ext_load(const uint ib, const uint k) {
    const uint head = ext_half(ib, 0);
    return ext_words(uint[2](ext_word(ib, 2 + 4*k), ext_word(ib, 34 + 4*k)), head >> 8, ext_e5m3(head & 0xff));
}
ext_words ext_load_lane(const uint ib, const uint c) {
    const uint head = ext_half(ib, 0);
    return ext_words(uint[2](ext_byte(ib, 2 + c), ext_byte(ib, 34 + c)), head >> 8, ext_e5m3(head & 0xff));
}
vec4 ext_values(const ext_words w, const uint g) {
    const uint codes = g < 4 ? w.codes[0] : w.codes[1];
    vec4 q;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        q[b] = float((121*ext_get_byte(codes, b) + 1178) >> (9 - 3*(g & 3)) & 63);
    }
    const uint scales = 11u << 24 | 8u << 16 | 6u << 8 | 5u;
    const float scale = float(ext_get_byte(scales, w.scales >> 2*(g/2) & 3));
    return q*scale - 32.0*scale;
}
float ext_scale(const ext_words w) { return w.d; }
