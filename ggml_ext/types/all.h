// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Block structs and scalar unpack of every weight type.
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
