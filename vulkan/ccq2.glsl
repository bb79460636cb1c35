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
#define EXT_GROUP_SCALE
uint ext_group_scale(const ext_words w, const uint g) { return ext_get_byte(11u << 24 | 8u << 16 | 6u << 8 | 5u, w.scales >> 2*(g/2) & 3); }
// A multiplication gives the codes of two bytes. They stand for -32 to 31.
int ext_ints(const ext_words w, const uint g) {
    const uint codes = g < 4 ? w.codes[0] : w.codes[1], shift = 9 - 3*(g & 3);
    const uint even = 121*(codes & 0x00ff00ff) + 1178*0x10001, odd = 121*(codes >> 8 & 0x00ff00ff) + 1178*0x10001;
    return int(ext_centered((even >> shift & 0x003f003f) | ((shift < 8 ? odd << (8 - shift) : odd >> (shift - 8)) & 0x3f003f00), 32));
}
vec4 ext_values(const ext_words w, const uint g) {
    const uint codes = g < 4 ? w.codes[0] : w.codes[1];
    vec4 q;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        q[b] = float((121*ext_get_byte(codes, b) + 1178) >> (9 - 3*(g & 3)) & 63);
    }
    const float scale = float(ext_group_scale(w, g));
    return q*scale - 32.0*scale;
}
float ext_scale(const ext_words w) { return w.d; }
