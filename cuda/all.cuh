// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// CUDA unpack of all weight types.
#pragma once

#include "itq3_s.cuh"
#include "ccq2.cuh"
#include "ditto3.cuh"
#include "trellis.cuh"
#include "ditto5.cuh"
