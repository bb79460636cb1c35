// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Unpack in Metal of every weight type.
#pragma once

#include "itq3_s.metal"
#include "ccq2.metal"
#include "ditto3.metal"
#include "trellis.metal"
#include "ditto5.metal"
