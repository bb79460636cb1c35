// Encoder of ITQ4_T: trellis.h with K = 4.
#include "trellis.h"

#include "../types/itq4_t.h"

DEFINE_TRELLIS_ENCODER(itq4_t, ITQ4_T, 4, NULL)
