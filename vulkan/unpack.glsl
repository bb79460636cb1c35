// The unpack interface in GLSL, included where data_a is declared. A block of n = QUANT_K = 256, 64 or 32 weights has n/32 threads.
// Thread k has word k of every bit plane: the 32 weights L*g + 4*k + b, L = n/8, g = 0 ... 7, b = 0 ... 3. A type defines:
//   ext_words                the data of thread k, from ext_load(block, k)
//   ext_load_lane(block, c)  the same with byte c of every plane as byte 0: ext_values(words, g).x is weight L*g + c of lane c = 0 ... L - 1
//   ext_values(words, g)     the four weights of group g: (code - offset) times the integer scale, exact; or the codes, see EXT_OFFSET
//   EXT_OFFSET               if defined, the caller subtracts ext_offset(words)
//   ext_scale(words)         the factor of the values
//   NEEDS_INIT_IQ_SHMEM      if defined, init_iq_shmem() must first fill a table in shared memory
// With EXT_INTEGER, in place of ext_values():
//   ext_ints(words, g)       these weights, or the codes, as four signed bytes
//   EXT_GROUP_SCALE          if defined, they do not include the integer scale ext_group_scale(words, g)
// The integers equal those of ggml_ext/types/<type>.h. types.glsl (generated) has the block, as words of EXT_WORD_BITS for its alignment,
// its sizes and the constants of codes.
#extension GL_EXT_control_flow_attributes : enable

// Two and four bytes of a block at byte `offset`.
#if EXT_WORD_BITS == 32
uint ext_word(const uint ib, const uint offset) { return data_a[ib].w[offset/4]; }
#else
uint ext_half(const uint ib, const uint offset) { return uint(data_a[ib].w[offset/2]); }
uint ext_word(const uint ib, const uint offset) { return ext_half(ib, offset) | ext_half(ib, offset + 2) << 16; }
#endif

// The byte of a block at `offset`, with other bytes above it.
#if EXT_WORD_BITS == 32
uint ext_byte(const uint ib, const uint offset) { return data_a[ib].w[offset/4] >> 8*(offset & 3); }
#else
uint ext_byte(const uint ib, const uint offset) { return ext_half(ib, offset) >> 8*(offset & 1); }
#endif

// Four bytes as floats. Compilers recognize byte conversions in this form; ACO misses them after unpack8().
vec4 ext_bytes(const uint q) {
    return vec4(float(q & 0xff), float(q >> 8 & 0xff), float(q >> 16 & 0xff), float(q >> 24));
}
uint ext_get_byte(const uint word, const uint b) { return bitfieldExtract(word, int(8*b), 8); }

// Four codes below 128 less `offset`, as signed bytes. No byte carries.
uint ext_centered(const uint codes, const uint offset) { return (codes + 0x01010101*(128 - offset)) ^ 0x80808080; }
// Four bytes, the last with any bits above it.
int ext_pack(const uint b0, const uint b1, const uint b2, const uint b3) { return int(b0 | b1 << 8 | b2 << 16 | b3 << 24); }

// Byte i of a constant table of 16.
uint ext_look_up(const uint table[4], const uint i) {
    const uint word = (i & 8) == 0 ? ((i & 4) == 0 ? table[0] : table[1]) : ((i & 4) == 0 ? table[2] : table[3]);
    return ext_get_byte(word, i & 3);
}

// Scales as halves and as one byte (types/e5m3.h). The latter avoids halves, because drivers may flush subnormal halves to zero.
float ext_half_to_float(const uint bits) { return unpackHalf2x16(bits).x; }
float ext_e5m3(const uint d) {
    return d < 8 ? float(d)*(1.0/33554432.0) : uintBitsToFloat((d << 20) + (104u << 23));
}

#include "all.glsl"
