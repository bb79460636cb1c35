// ITQ3_S (types/itq3_s.h).
struct ext_words { uint low[2], high; vec2 dz; };
#define EXT_OFFSET

ext_words ext_load(const uint ib, const uint k) {
    return ext_words(uint[2](ext_word(ib, 4 + 4*k), ext_word(ib, 36 + 4*k)), ext_word(ib, 68 + 4*k), unpackHalf2x16(ext_word(ib, 0)));
}
ext_words ext_load_lane(const uint ib, const uint c) {
    return ext_words(uint[2](ext_byte(ib, 4 + c), ext_byte(ib, 36 + c)), ext_byte(ib, 68 + c), unpackHalf2x16(ext_word(ib, 0)));
}
uint ext_codes(const ext_words w, const uint g) {
    const uint low = (g < 4 ? w.low[0] : w.low[1]) >> 2*(g & 3), high = g < 2 ? w.high << (2 - g) : w.high >> (g - 2);
    return (low & 0x03030303) | (high & 0x04040404);
}
int  ext_ints(const ext_words w, const uint g) { return int(ext_codes(w, g)); }
vec4 ext_values(const ext_words w, const uint g) { return ext_bytes(ext_codes(w, g)); }
float ext_scale(const ext_words w) { return w.dz.x; }
float ext_offset(const ext_words w) { return w.dz.y; }
