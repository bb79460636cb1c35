// ITQ3_T64: types/itq3_t64.h. The same code in blocks of 64.
#include "trellis.glsl"
