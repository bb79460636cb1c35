// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Metal unpack of all weight types.
#pragma once

#include "itq3_s.metal"
#include "ccq2.metal"
#include "ditto3.metal"
#include "trellis.metal"
#include "ditto5.metal"
