// DITTO3: types/ditto3.h. The codebook is two words of four bytes.
struct ext_words { uint low[2], high, codebook[2]; float d; };

ext_words ext_load(const uint ib, const uint k) {
    return ext_words(uint[2](ext_word(ib, 10 + 4*k), ext_word(ib, 42 + 4*k)), ext_word(ib, 74 + 4*k),
                     uint[2](ext_word(ib, 2), ext_word(ib, 6)), ext_half_to_float(ext_half(ib, 0)));
}
vec4 ext_values(const ext_words w, const uint g) {
    const uint low = (g < 4 ? w.low[0] : w.low[1]) >> 2*(g & 3), high = w.high >> g;
    vec4 v;
    [[unroll]] for (uint b = 0; b < 4; ++b) {
        const uint word = (high >> 8*b & 1) != 0 ? w.codebook[1] : w.codebook[0];
        v[b] = float(ext_get_byte(word, low >> 8*b & 3) & 127) - 64.0;
    }
    return v;
}
float ext_scale(const ext_words w) { return w.d; }
