// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Signs of the rotation, the trellis types and their codes, codebooks.
#pragma once

#define GGML_EXT_SIGNS {0xe18ae0c5u, 0xa289b7feu, 0x1e40d0c6u, 0x96201bafu, 0xd5b4ce30u, 0xd765edc7u, 0x98ec1743u, 0x6e45a49fu}

#define GGML_EXT_TRELLIS_CASES \
    case GGML_TYPE_ITQ4_T: \
    case GGML_TYPE_ITQ3_T: \
    case GGML_TYPE_ITQ2_T: \
    case GGML_TYPE_ITQ1H_T: \
    case GGML_TYPE_ITQ1_T: \
    case GGML_TYPE_ITQ4_T64: \
    case GGML_TYPE_ITQ3_T64: \
    case GGML_TYPE_ITQ2_T64: \
    case GGML_TYPE_ITQ1H_T64: \
    case GGML_TYPE_ITQ1_T64: \
    case GGML_TYPE_ITQ4_T32: \
    case GGML_TYPE_ITQ3_T32: \
    case GGML_TYPE_ITQ2_T32:

#define GGML_EXT_CODEBOOK_CASES \
    case GGML_TYPE_DITTO5:

//  (NAME,      name,      K, V, n,   code,    offset, gain,  feedback, unit,   NMSE)
#define GGML_EXT_TRELLIS_TYPES(X) \
    X(ITQ4_T,    itq4_t,    4, 1, 256, itq4_t,  64.0f,  1.07f, 1.07f,    220.0f, 0.00459f) \
    X(ITQ3_T,    itq3_t,    3, 1, 256, itq3_t,  60.0f,  1.07f, 1.07f,    204.0f, 0.01755f) \
    X(ITQ2_T,    itq2_t,    2, 1, 256, itq2_t,  62.0f,  1.03f, 1.03f,    174.0f, 0.0683f) \
    X(ITQ1H_T,   itq1h_t,   3, 2, 256, itq1h_t, 60.0f,  0.98f, 1.15f,    156.0f, 0.1357f) \
    X(ITQ1_T,    itq1_t,    2, 2, 256, itq1_t,  60.0f,  0.89f, 1.15f,    128.0f, 0.262f) \
    X(ITQ4_T64,  itq4_t64,  4, 1, 64,  itq4_t,  64.0f,  1.07f, 1.07f,    220.0f, 0.00394f) \
    X(ITQ3_T64,  itq3_t64,  3, 1, 64,  itq3_t,  60.0f,  1.07f, 1.07f,    204.0f, 0.01535f) \
    X(ITQ2_T64,  itq2_t64,  2, 1, 64,  itq2_t,  62.0f,  1.03f, 1.03f,    174.0f, 0.0602f) \
    X(ITQ1H_T64, itq1h_t64, 3, 2, 64,  itq1h_t, 60.0f,  0.98f, 1.15f,    156.0f, 0.1209f) \
    X(ITQ1_T64,  itq1_t64,  2, 2, 64,  itq1_t,  60.0f,  0.89f, 1.15f,    128.0f, 0.2351f) \
    X(ITQ4_T32,  itq4_t32,  4, 1, 32,  itq4_t,  64.0f,  1.07f, 1.07f,    220.0f, 0.00328f) \
    X(ITQ3_T32,  itq3_t32,  3, 1, 32,  itq3_t,  60.0f,  1.07f, 1.07f,    204.0f, 0.01294f) \
    X(ITQ2_T32,  itq2_t32,  2, 1, 32,  itq2_t,  62.0f,  1.03f, 1.03f,    174.0f, 0.0507f)

#define GGML_EXT_TRELLIS_TABLES_itq4_t {{{25, 31, 37, 47, 14, 0, 9, 51, 34, 57, 43, 18, 28, 71, 40, 22}, {24, 45, 33, 29, 37, 30, 54, 35, 26, 40, 0, 20, 32, 29, 27, 35}}}

#define GGML_EXT_TRELLIS_TABLES_itq3_t {{{16, 39, 0, 27, 40, 13, 23, 29, 31, 14, 24, 54, 20, 34, 46, 6}, {34, 41, 36, 15, 32, 45, 21, 53, 24, 31, 26, 46, 41, 0, 66, 32}}}

#define GGML_EXT_TRELLIS_TABLES_itq2_t {{{38, 23, 78, 52, 22, 48, 0, 37, 48, 36, 21, 65, 57, 64, 40, 21}, {22, 10, 32, 14, 14, 28, 0, 22, 44, 22, 23, 12, 31, 14, 22, 28}}}

#define GGML_EXT_TRELLIS_TABLES_itq1h_t {{{42, 38, 66, 15, 16, 20, 46, 33, 34, 31, 15, 54, 28, 23, 1, 44}, {19, 45, 11, 43, 45, 6, 33, 29, 54, 11, 39, 21, 20, 35, 41, 0}, {36, 17, 57, 36, 59, 23, 0, 36, 44, 58, 37, 14, 17, 47, 31, 71}, {29, 17, 20, 21, 22, 14, 4, 39, 31, 23, 10, 48, 0, 33, 38, 35}}}

#define GGML_EXT_TRELLIS_TABLES_itq1_t {{{30, 52, 25, 78, 99, 43, 72, 37, 61, 71, 37, 0, 32, 11, 59, 63}, {1, 22, 16, 9, 15, 0, 6, 14, 17, 19, 16, 6, 7, 8, 16, 17}, {12, 16, 11, 1, 23, 3, 5, 3, 8, 9, 7, 5, 5, 3, 11, 7}, {24, 63, 59, 42, 39, 50, 79, 23, 79, 28, 38, 61, 56, 103, 0, 76}}}

#define GGML_EXT_DITTO5_CODEBOOK {65, 67, 70, 73, 76, 79, 82, 85, 88, 91, 95, 99, 104, 110, 117, 127}
#define GGML_EXT_DITTO5_CODEBOOK_OFFSET 63.5f
