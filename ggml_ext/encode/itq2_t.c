// Encoder of ITQ2_T: trellis.h with K = 2.
#include "trellis.h"

#include "../types/itq2_t.h"

DEFINE_TRELLIS_ENCODER(itq2_t, ITQ2_T, 2, NULL)
