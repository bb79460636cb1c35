// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Signs of the rotation, tables of the trellis codes, codebooks.
#pragma once

#define GGML_EXT_SIGNS {0xe18ae0c5u, 0xa289b7feu, 0x1e40d0c6u, 0x96201bafu, 0xd5b4ce30u, 0xd765edc7u, 0x98ec1743u, 0x6e45a49fu}

#define GGML_EXT_TRELLIS_CASES \
    case GGML_TYPE_ITQ3_T: \
    case GGML_TYPE_ITQ2_T: \
    case GGML_TYPE_ITQ3_T64: \
    case GGML_TYPE_ITQ2_T64:

#define GGML_EXT_ITQ3_T_TRELLIS_TABLES {{{2, 13, 1, 5, 11, 7, 6, 14, 0, 10, 3, 4, 12, 8, 9, 15}, {13, 0, 10, 8, 5, 3, 6, 13, 12, 7, 11, 15, 4, 14, 1, 2}}, {{11, 32, 23, 43, 0, 31, 16, 64, 20, 40, 52, 32, 44, 22, 29, 36}, {48, 25, 38, 0, 41, 32, 36, 11, 22, 52, 27, 35, 63, 18, 46, 30}}}
#define GGML_EXT_ITQ3_T_TRELLIS_OFFSET 63.5f
#define GGML_EXT_ITQ3_T_TRELLIS_USUAL_REL_MSE 0.0178f

#define GGML_EXT_ITQ2_T_TRELLIS_TABLES {{{10, 13, 7, 5, 11, 0, 2, 9, 6, 12, 8, 4, 3, 15, 14, 1}, {6, 11, 2, 13, 3, 12, 1, 14, 10, 8, 4, 0, 9, 15, 5, 15}}, {{81, 30, 46, 36, 41, 41, 0, 45, 56, 14, 29, 65, 25, 56, 61, 17}, {15, 21, 21, 30, 20, 26, 23, 27, 24, 0, 14, 34, 41, 20, 21, 12}}}
#define GGML_EXT_ITQ2_T_TRELLIS_OFFSET 62.0f
#define GGML_EXT_ITQ2_T_TRELLIS_USUAL_REL_MSE 0.0683f

#define GGML_EXT_ITQ3_T64_TRELLIS_TABLES {{{2, 13, 1, 5, 11, 7, 6, 14, 0, 10, 3, 4, 12, 8, 9, 15}, {13, 0, 10, 8, 5, 3, 6, 13, 12, 7, 11, 15, 4, 14, 1, 2}}, {{11, 32, 23, 43, 0, 31, 16, 64, 20, 40, 52, 32, 44, 22, 29, 36}, {48, 25, 38, 0, 41, 32, 36, 11, 22, 52, 27, 35, 63, 18, 46, 30}}}
#define GGML_EXT_ITQ3_T64_TRELLIS_OFFSET 63.5f
#define GGML_EXT_ITQ3_T64_TRELLIS_USUAL_REL_MSE 0.0156f

#define GGML_EXT_ITQ2_T64_TRELLIS_TABLES {{{10, 13, 7, 5, 11, 0, 2, 9, 6, 12, 8, 4, 3, 15, 14, 1}, {6, 11, 2, 13, 3, 12, 1, 14, 10, 8, 4, 0, 9, 15, 5, 15}}, {{81, 30, 46, 36, 41, 41, 0, 45, 56, 14, 29, 65, 25, 56, 61, 17}, {15, 21, 21, 30, 20, 26, 23, 27, 24, 0, 14, 34, 41, 20, 21, 12}}}
#define GGML_EXT_ITQ2_T64_TRELLIS_OFFSET 62.0f
#define GGML_EXT_ITQ2_T64_TRELLIS_USUAL_REL_MSE 0.0603f

#define GGML_EXT_DITTO5_CODEBOOK {65, 67, 70, 73, 76, 79, 82, 85, 88, 91, 95, 99, 104, 110, 117, 127}
#define GGML_EXT_DITTO5_CODEBOOK_OFFSET 63.5f
