// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Unpack over the SIMD primitives of every weight type.
#pragma once

#include "itq3_s.h"
#include "ccq2.h"
#include "ditto3.h"
#include "itq4_t.h"
#include "itq3_t.h"
#include "itq2_t.h"
#include "itq4_t64.h"
#include "itq3_t64.h"
#include "itq2_t64.h"
#include "ditto5.h"
