// The rotation R = H S (ggml_ext/ggml-ext-rotation.h) of EXT_VALUES values in shared memory, in blocks of N = EXT_ROTATION = 256 or 64.
// Threads take sqrt(N) = EXT_R values at a time in registers. Butterflies run at strides 1, 2, 4 ... in the reference's order, so
// that results are its bits: strides 1 to R/2 of neighbours, then, behind a barrier, strides R to N/2.
#include "signs.glsl"

#if EXT_ROTATION == 64
#define EXT_R 8
#else
#define EXT_R 16
#endif
const uint EXT_N = EXT_R*EXT_R, EXT_ITEMS = EXT_VALUES/EXT_R; // pieces of work in a half of the transform
shared float ext_shared[EXT_VALUES + EXT_VALUES/EXT_R];       // a word of padding for each R, against bank conflicts

uint ext_at(const uint i) { return i + i/EXT_R; }

// S at position j of a block.
float ext_signed(const float x, const uint j) {
    return uintBitsToFloat(floatBitsToUint(x) ^ (ext_signs[j >> 5] >> (j & 31) & 1) << 31);
}
void ext_butterflies(inout float v[EXT_R]) {
    [[unroll]] for (uint h = 1; h < EXT_R; h *= 2) {
        [[unroll]] for (uint i = 0; i < EXT_R; ++i) {
            if ((i & h) == 0) {
                const float a = v[i], b = v[i + h];
                v[i]     = a + b;
                v[i + h] = a - b;
            }
        }
    }
}
// The first half of piece `item`, in place: the values R*item + i.
void ext_transform_neighbours(const uint item) {
    float v[EXT_R];
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] = ext_shared[ext_at(EXT_R*item + i)]; }
    ext_butterflies(v);
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { ext_shared[ext_at(EXT_R*item + i)] = v[i]; }
}
// Where the values of the second half are: ext_position(item) + R*i; the first one's place in its block is item % R.
uint ext_position(const uint item) { return EXT_N*(item/EXT_R) + item%EXT_R; }
void ext_transform_strides(const uint item, out float v[EXT_R]) {
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] = ext_shared[ext_at(ext_position(item) + EXT_R*i)]; }
    ext_butterflies(v);
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] *= 1.0/EXT_R; }
}
