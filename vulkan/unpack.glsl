// The unpack contract in GLSL, included where data_a is declared. A block of n = 256 or 64 weights (QUANT_K) lies in n/32 threads:
// thread k has word k of every plane of bits, that is the 32 weights L*g + 4*k + b, L = n/8, g = 0 ... 7, b = 0 ... 3. A type has
//   ext_words                what ext_load(block, k) takes of a block for thread k
//   ext_values(words, g)     its four weights of group g: codes minus offset times the integer scale, exact, or codes alone
//   EXT_OFFSET               defined in the second case: ext_offset(words) is to be subtracted
//   ext_scale(words)         what that is multiplied with
//   NEEDS_INIT_IQ_SHMEM      defined where ext_values() looks up a table in shared memory, which init_iq_shmem() fills
// Everything else in this folder follows. The integers are those of ggml_ext/types/<type>.h. types.glsl, which is generated, has the
// block (words of EXT_WORD_BITS, as its alignment allows), its sizes and the constants of codes.
#extension GL_EXT_control_flow_attributes : enable

// Two and four bytes of a block.
#if EXT_WORD_BITS == 32
uint ext_word(const uint ib, const uint at) { return data_a[ib].w[at/4]; }
#else
uint ext_half(const uint ib, const uint at) { return uint(data_a[ib].w[at/2]); }
uint ext_word(const uint ib, const uint at) { return ext_half(ib, at) | ext_half(ib, at + 2) << 16; }
#endif

// Four bytes as floats. Compilers find their conversions of single bytes in this form; behind unpack8() ACO misses them.
vec4 ext_bytes(const uint q) {
    return vec4(float(q & 0xff), float(q >> 8 & 0xff), float(q >> 16 & 0xff), float(q >> 24));
}
uint ext_get_byte(const uint word, const uint b) { return bitfieldExtract(word, int(8*b), 8); }

// Byte i of 16 in a constant array.
uint ext_look_up(const uint table[4], const uint i) {
    const uint word = (i & 8) == 0 ? ((i & 4) == 0 ? table[0] : table[1]) : ((i & 4) == 0 ? table[2] : table[3]);
    return ext_get_byte(word, i & 3);
}

// Scales of halves and of one byte, types/e5m3.h. The latter not by way of a half: whether subnormal ones count is the driver's choice.
float ext_half_to_float(const uint bits) { return unpackHalf2x16(bits).x; }
float ext_e5m3(const uint d) {
    return d < 8 ? float(d)*(1.0/33554432.0) : uintBitsToFloat((d << 20) + (104u << 23));
}

#include "all.glsl"
