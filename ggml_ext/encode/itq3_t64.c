// Encoder of ITQ3_T64: trellis.h with K = 3.
#include "trellis.h"

#include "../types/itq3_t64.h"

DEFINE_TRELLIS_ENCODER(itq3_t64, ITQ3_T64, 3, b->qh)
