// Encoder of ITQ4_T64: trellis.h with K = 4.
#include "trellis.h"

#include "../types/itq4_t64.h"

DEFINE_TRELLIS_ENCODER(itq4_t64, ITQ4_T64, 4, NULL)
