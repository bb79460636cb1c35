// Generated from ggml_ext/types.toml by scripts/gen_types.py; do not edit.
#pragma once

#define GGML_EXT_TYPE_ENUM \
    GGML_TYPE_ITQ3_S = 160, \
    GGML_TYPE_Q8_KR = 191,

#define GGML_EXT_TYPE_COUNT 192

#define GGML_EXT_FTYPE_ENUM(P) \
    P##ITQ3_S = 160,

#define GGML_EXT_WEIGHT_TYPES(X) \
    X(ITQ3_S, itq3_s)

#define GGML_EXT_WEIGHT_CASES \
    case GGML_TYPE_ITQ3_S:

#define GGML_EXT_ACTIVATION_CASES \
    case GGML_TYPE_Q8_KR:

#define GGML_EXT_ITQ3_S_ID              160
#define GGML_EXT_ITQ3_S_BLOCK_BYTES     100
#define GGML_EXT_ITQ3_S_UNPACK_MIN      0
#define GGML_EXT_ITQ3_S_UNPACK_MAX      7
#define GGML_EXT_ITQ3_S_GROUP           256
#define GGML_EXT_ITQ3_S_HAS_OFFSET      1
#define GGML_EXT_ITQ3_S_ROTATED         1
#define GGML_EXT_ITQ3_S_ACTIVATION      GGML_TYPE_Q8_KR
#define GGML_EXT_ITQ3_S_FALLBACK        GGML_TYPE_IQ4_NL
#define GGML_EXT_ITQ3_S_TOKEN_EMBD      GGML_TYPE_Q3_K
#define GGML_EXT_ITQ3_S_OUTPUT          GGML_TYPE_Q6_K
#define GGML_EXT_ITQ3_S_TITLE           "ITQ3_S - 3.125 bpw"
#define GGML_EXT_ITQ3_S_FNS_TOTAL_ERROR 0.0076f
#define GGML_EXT_ITQ3_S_FNS_DOT_ERROR   0.148f

#define GGML_EXT_Q8_KR_ID          191
#define GGML_EXT_Q8_KR_BLOCK_BYTES 292
