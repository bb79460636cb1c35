// The rotation R = H S (ggml_ext/ggml-ext-rotation.h) of EXT_VALUES values in shared memory, in blocks of EXT_ROTATION = 256, 64 or
// 32; with 0 only the shared memory. An item is EXT_R values in a thread's registers. Items of neighbors do the butterflies at strides 1 to R/2,
// then, after a barrier, items of values R apart the others: R*R values are one block, or two blocks of 32. The order is the reference's, so the
// results are bit-equal.
#if EXT_ROTATION == 0
shared float ext_shared[EXT_VALUES];
uint ext_padded(const uint i) { return i; }
float ext_signed(const float x, const uint j) { return x; }
void ext_rotate() {}
#else
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
const uint EXT_ITEMS = EXT_VALUES/EXT_R;                // per half of the transform
shared float ext_shared[EXT_VALUES + EXT_VALUES/EXT_R]; // a word of padding per EXT_R, against bank conflicts

uint ext_padded(const uint i) { return i + i/EXT_R; }

// Apply the sign S of position j.
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
// Transform EXT_R values at `begin` in place.
void ext_transform(const uint begin, const uint stride, const uint n, const float scale) {
    float v[EXT_R];
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { v[i] = ext_shared[ext_padded(begin + stride*i)]; }
    ext_butterflies(v, n);
    [[unroll]] for (uint i = 0; i < EXT_R; ++i) { ext_shared[ext_padded(begin + stride*i)] = v[i]*scale; }
}
// Rotate values that have their signs, in place, with 64 threads.
void ext_rotate() {
    for (uint item = gl_LocalInvocationIndex; item < EXT_ITEMS; item += 64) {
        ext_transform(EXT_R*item, 1, EXT_R, 1.0);
    }
    barrier();
    for (uint item = gl_LocalInvocationIndex; item < EXT_ITEMS; item += 64) {
        ext_transform(EXT_R*EXT_R*(item/EXT_R) + item%EXT_R, EXT_R, EXT_ROTATION/EXT_R, EXT_ROTATION_SCALE);
    }
    barrier();
}
#endif
