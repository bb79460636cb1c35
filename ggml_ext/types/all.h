// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Block structs and scalar unpack of all weight types.
#pragma once

#include "itq3_s.h"
#include "ccq2.h"
#include "ditto3.h"
#include "trellis.h"
#include "ditto5.h"
