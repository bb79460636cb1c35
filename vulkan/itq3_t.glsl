// ITQ3_T: types/itq3_t.h.
#include "trellis.glsl"
