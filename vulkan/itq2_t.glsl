// ITQ2_T: types/itq2_t.h.
#include "trellis.glsl"
