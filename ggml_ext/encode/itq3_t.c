// Encoder of ITQ3_T: trellis.h with K = 3.
#include "trellis.h"

#include "../types/itq3_t.h"

DEFINE_TRELLIS_ENCODER(itq3_t, ITQ3_T, 3, b->qh)
