// ITQ4_T64: types/itq4_t64.h. The same code in blocks of 64.
#include "trellis.glsl"
