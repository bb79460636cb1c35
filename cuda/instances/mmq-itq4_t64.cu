// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
#include "ggml-cuda/mmq.cuh"

DECL_MMQ_CASE(GGML_TYPE_ITQ4_T64);
