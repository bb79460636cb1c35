// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Signs of the rotation, the trellis types and their codes, codebooks.
#pragma once

#define GGML_EXT_SIGNS {0xe18ae0c5u, 0xa289b7feu, 0x1e40d0c6u, 0x96201bafu, 0xd5b4ce30u, 0xd765edc7u, 0x98ec1743u, 0x6e45a49fu}

#define GGML_EXT_TRELLIS_CASES \
    case GGML_TYPE_ITQ4_T: \
    case GGML_TYPE_ITQ3_T: \
    case GGML_TYPE_ITQ2_T: \
    case GGML_TYPE_ITQ4_T64: \
    case GGML_TYPE_ITQ3_T64: \
    case GGML_TYPE_ITQ2_T64:

#define GGML_EXT_CODEBOOK_CASES \
    case GGML_TYPE_DITTO5:

//  (NAME,     name,     K, n,   code,   offset, gain,  unit,   NMSE)
#define GGML_EXT_TRELLIS_TYPES(X) \
    X(ITQ4_T,   itq4_t,   4, 256, itq4_t, 64.0f,  1.07f, 220.0f, 0.00459f) \
    X(ITQ3_T,   itq3_t,   3, 256, itq3_t, 60.0f,  1.07f, 204.0f, 0.01755f) \
    X(ITQ2_T,   itq2_t,   2, 256, itq2_t, 62.0f,  1.03f, 174.0f, 0.0683f) \
    X(ITQ4_T64, itq4_t64, 4, 64,  itq4_t, 64.0f,  1.07f, 220.0f, 0.00394f) \
    X(ITQ3_T64, itq3_t64, 3, 64,  itq3_t, 60.0f,  1.07f, 204.0f, 0.01535f) \
    X(ITQ2_T64, itq2_t64, 2, 64,  itq2_t, 62.0f,  1.03f, 174.0f, 0.0602f)

#define GGML_EXT_TRELLIS_TABLES_itq4_t {{{25, 31, 37, 47, 14, 0, 9, 51, 34, 57, 43, 18, 28, 71, 40, 22}, {24, 45, 33, 29, 37, 30, 54, 35, 26, 40, 0, 20, 32, 29, 27, 35}}}

#define GGML_EXT_TRELLIS_TABLES_itq3_t {{{16, 39, 0, 27, 40, 13, 23, 29, 31, 14, 24, 54, 20, 34, 46, 6}, {34, 41, 36, 15, 32, 45, 21, 53, 24, 31, 26, 46, 41, 0, 66, 32}}}

#define GGML_EXT_TRELLIS_TABLES_itq2_t {{{38, 23, 78, 52, 22, 48, 0, 37, 48, 36, 21, 65, 57, 64, 40, 21}, {22, 10, 32, 14, 14, 28, 0, 22, 44, 22, 23, 12, 31, 14, 22, 28}}}

#define GGML_EXT_DITTO5_CODEBOOK {65, 67, 70, 73, 76, 79, 82, 85, 88, 91, 95, 99, 104, 110, 117, 127}
#define GGML_EXT_DITTO5_CODEBOOK_OFFSET 63.5f
