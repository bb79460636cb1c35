// DITTO5 (types/ditto5.h). Shared memory holds all 32 codebook values, one per bank; as integers twice the values, which have halves.
struct ext_words { uint low[4], high; float d; };

#define NEEDS_INIT_IQ_SHMEM
#ifdef EXT_INTEGER
#define EXT_ENTRY(value) (uint(int(2.0*(value))) & 0xff)
shared uint ext_table[32];
#else
#define EXT_ENTRY(value) (value)
shared float ext_table[32];
#endif

void init_iq_shmem(const uvec3 workgroup) {
    for (uint i = gl_LocalInvocationIndex; i < 32; i += workgroup.x*workgroup.y*workgroup.z) {
        const float upper = float(ext_look_up(ext_codebook, i & 15)) - ext_codebook_offset;
        ext_table[i] = EXT_ENTRY(i < 16 ? upper : -upper);
    }
    barrier();
}
ext_words ext_load(const uint ib, const uint k) {
    ext_words w;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        w.low[i] = ext_word(ib, 2 + 32*i + 4*k);
    }
    w.high = ext_word(ib, 130 + 4*k);
    w.d    = ext_half_to_float(ext_half(ib, 0));
    return w;
}
ext_words ext_load_lane(const uint ib, const uint c) {
    ext_words w;
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        w.low[i] = ext_byte(ib, 2 + 32*i + c);
    }
    w.high = ext_byte(ib, 130 + c);
    w.d    = ext_half_to_float(ext_half(ib, 0));
    return w;
}
uint ext_indices(const ext_words w, const uint g) {
    const uint low = w.low[2*(g/2 & 1) + g/4] >> 4*(g & 1) & 0x0f0f0f0f, high = g < 4 ? w.high << (4 - g) : w.high >> (g - 4);
    return low | (high & 0x10101010);
}
#ifdef EXT_INTEGER
int ext_ints(const ext_words w, const uint g) {
    const uint i = ext_indices(w, g);
    return ext_pack(ext_table[ext_get_byte(i, 0)], ext_table[ext_get_byte(i, 1)], ext_table[ext_get_byte(i, 2)], ext_table[ext_get_byte(i, 3)]);
}
float ext_scale(const ext_words w) { return 0.5*w.d; }
#else
vec4 ext_values(const ext_words w, const uint g) {
    const uint i = ext_indices(w, g);
    return vec4(ext_table[ext_get_byte(i, 0)], ext_table[ext_get_byte(i, 1)], ext_table[ext_get_byte(i, 2)], ext_table[ext_get_byte(i, 3)]);
}
float ext_scale(const ext_words w) { return w.d; }
#endif
