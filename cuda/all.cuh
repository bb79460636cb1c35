// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Unpack on the device of every weight type.
#pragma once

#include "itq3_s.cuh"
#include "ccq2.cuh"
#include "ditto3.cuh"
#include "itq4_t.cuh"
#include "itq3_t.cuh"
#include "itq2_t.cuh"
#include "itq4_t64.cuh"
#include "itq3_t64.cuh"
#include "itq2_t64.cuh"
#include "ditto5.cuh"
