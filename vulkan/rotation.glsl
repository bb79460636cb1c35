// The rotation R = H S (ggml_ext/ggml-ext-rotation.h) of EXT_VALUES values in shared memory, in blocks of EXT_ROTATION = 256, 64 or
// 32. An item is EXT_R values in a thread's registers. Items of neighbors do the butterflies at strides 1 to R/2, then, after a barrier, items
// of values R apart the others. N = R*R values are one block, or two blocks of 32. The order is the reference's, so the results are bit-equal.
#include "signs.glsl"

#if EXT_ROTATION == 256
#define EXT_R 16
#else
#define EXT_R 8
#endif
#if EXT_ROTATION == 32
#define EXT_ROTATION_SCALE 0.17677669529663688
#else
#define EXT_ROTATION_SCALE (1.0/EXT_R)
#endif
const uint EXT_N = EXT_R*EXT_R, EXT_ITEMS = EXT_VALUES/EXT_R; // items per half of the transform
shared float ext_shared[EXT_VALUES + EXT_VALUES/EXT_R];       // a word of padding per EXT_R, against bank conflicts

uint ext_padded(const uint i) { return i + i/EXT_R; }

// Apply the sign S of position j among N values.
float ext_signed(const float x, const uint j) {
    return uintBitsToFloat(floatBitsToUint(x) ^ (ext_signs[j % EXT_ROTATION >> 5] >> (j & 31) & 1) << 31);
}
// Butterflies at strides 1 to n/2.
void ext_butterflies(inout float v[EXT_R], const uint n) {
    [[unroll]] for (uint h = 1; h < n; h *= 2) {
        [[unroll]] for (uint i = 0; i < EXT_R; ++i) {
            if ((i & h) == 0) {
                const float a = v[i], b = v[i + h];
                v[i]     = a + b;
                v[i + h] = a - b;
            }
        }
    }
}
// First half for an item, in place: values R*item + i.
void ext_transform_neighbors(const uint item) {
    float v[EXT_R];
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] = ext_shared[ext_padded(EXT_R*item + i)]; }
    ext_butterflies(v, EXT_R);
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { ext_shared[ext_padded(EXT_R*item + i)] = v[i]; }
}
// Second half for an item: values ext_position(item) + R*i. The first has position item % R among N values.
uint ext_position(const uint item) { return EXT_N*(item/EXT_R) + item%EXT_R; }
void ext_transform_strides(const uint item, out float v[EXT_R]) {
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] = ext_shared[ext_padded(ext_position(item) + EXT_R*i)]; }
    ext_butterflies(v, EXT_ROTATION/EXT_R);
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] *= EXT_ROTATION_SCALE; }
}
