// ITQ2_T64: types/itq2_t64.h. The same code in blocks of 64.
#include "trellis.glsl"
