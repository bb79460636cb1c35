// ITQ4_T: types/itq4_t.h.
#include "trellis.glsl"
