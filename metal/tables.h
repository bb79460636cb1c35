// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Types whose products look up a table in threadgroup memory.
#pragma once

#define GGML_EXT_METAL_TABLE_CASES \
    case GGML_TYPE_ITQ3_T: \
    case GGML_TYPE_ITQ2_T: \
    case GGML_TYPE_ITQ3_T64: \
    case GGML_TYPE_ITQ2_T64:
