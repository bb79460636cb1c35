// Encoder of ITQ2_T64: trellis.h with K = 2.
#include "trellis.h"

#include "../types/itq2_t64.h"

DEFINE_TRELLIS_ENCODER(itq2_t64, ITQ2_T64, 2, NULL)
