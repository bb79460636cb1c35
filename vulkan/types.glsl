// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Block struct and constants of the type that a shader is compiled for, used by unpack.glsl.
#if defined(DATA_A_ITQ3_S)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 32
struct ext_block { uint32_t w[25]; };
#elif defined(DATA_A_CCQ2)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 0
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[33]; };
#elif defined(DATA_A_DITTO3)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 0
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[53]; };
#elif defined(DATA_A_ITQ4_T)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[65]; };
#define EXT_TRELLIS_K 4
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x2f251f19u, 0x3309000eu, 0x122b3922u, 0x1628471cu);
const uint ext_trellis_values1[4] = uint[4](0x1d212d18u, 0x23361e25u, 0x1400281au, 0x231b1d20u);
const float ext_trellis_offset = 64.0;
#elif defined(DATA_A_ITQ3_T)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[49]; };
#define EXT_TRELLIS_K 3
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x1b002710u, 0x1d170d28u, 0x36180e1fu, 0x062e2214u);
const uint ext_trellis_values1[4] = uint[4](0x0f242922u, 0x35152d20u, 0x2e1a1f18u, 0x20420029u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ2_T)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[33]; };
#define EXT_TRELLIS_K 2
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x344e1726u, 0x25003016u, 0x41152430u, 0x15284039u);
const uint ext_trellis_values1[4] = uint[4](0x0e200a16u, 0x16001c0eu, 0x0c17162cu, 0x1c160e1fu);
const float ext_trellis_offset = 62.0;
#elif defined(DATA_A_ITQ1H_T)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[25]; };
#define EXT_TRELLIS_K 3
#define EXT_TRELLIS_V 2
const uint ext_trellis_values0[4] = uint[4](0x0f42262au, 0x212e1410u, 0x360f1f22u, 0x2c01171cu);
const uint ext_trellis_values1[4] = uint[4](0x2b0b2d13u, 0x1d21062du, 0x15270b36u, 0x00292314u);
const uint ext_trellis_values2[4] = uint[4](0x24391124u, 0x2400173bu, 0x0e253a2cu, 0x471f2f11u);
const uint ext_trellis_values3[4] = uint[4](0x1514111du, 0x27040e16u, 0x300a171fu, 0x23262100u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ1_T)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[17]; };
#define EXT_TRELLIS_K 2
#define EXT_TRELLIS_V 2
const uint ext_trellis_values0[4] = uint[4](0x4e19341eu, 0x25482b63u, 0x0025473du, 0x3f3b0b20u);
const uint ext_trellis_values1[4] = uint[4](0x09101601u, 0x0e06000fu, 0x06101311u, 0x11100807u);
const uint ext_trellis_values2[4] = uint[4](0x010b100cu, 0x03050317u, 0x05070908u, 0x070b0305u);
const uint ext_trellis_values3[4] = uint[4](0x2a3b3f18u, 0x174f3227u, 0x3d261c4fu, 0x4c006738u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ4_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[17]; };
#define EXT_TRELLIS_K 4
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x2f251f19u, 0x3309000eu, 0x122b3922u, 0x1628471cu);
const uint ext_trellis_values1[4] = uint[4](0x1d212d18u, 0x23361e25u, 0x1400281au, 0x231b1d20u);
const float ext_trellis_offset = 64.0;
#elif defined(DATA_A_ITQ3_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[13]; };
#define EXT_TRELLIS_K 3
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x1b002710u, 0x1d170d28u, 0x36180e1fu, 0x062e2214u);
const uint ext_trellis_values1[4] = uint[4](0x0f242922u, 0x35152d20u, 0x2e1a1f18u, 0x20420029u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ2_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[9]; };
#define EXT_TRELLIS_K 2
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x344e1726u, 0x25003016u, 0x41152430u, 0x15284039u);
const uint ext_trellis_values1[4] = uint[4](0x0e200a16u, 0x16001c0eu, 0x0c17162cu, 0x1c160e1fu);
const float ext_trellis_offset = 62.0;
#elif defined(DATA_A_ITQ1H_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[7]; };
#define EXT_TRELLIS_K 3
#define EXT_TRELLIS_V 2
const uint ext_trellis_values0[4] = uint[4](0x0f42262au, 0x212e1410u, 0x360f1f22u, 0x2c01171cu);
const uint ext_trellis_values1[4] = uint[4](0x2b0b2d13u, 0x1d21062du, 0x15270b36u, 0x00292314u);
const uint ext_trellis_values2[4] = uint[4](0x24391124u, 0x2400173bu, 0x0e253a2cu, 0x471f2f11u);
const uint ext_trellis_values3[4] = uint[4](0x1514111du, 0x27040e16u, 0x300a171fu, 0x23262100u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ1_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[5]; };
#define EXT_TRELLIS_K 2
#define EXT_TRELLIS_V 2
const uint ext_trellis_values0[4] = uint[4](0x4e19341eu, 0x25482b63u, 0x0025473du, 0x3f3b0b20u);
const uint ext_trellis_values1[4] = uint[4](0x09101601u, 0x0e06000fu, 0x06101311u, 0x11100807u);
const uint ext_trellis_values2[4] = uint[4](0x010b100cu, 0x03050317u, 0x05070908u, 0x070b0305u);
const uint ext_trellis_values3[4] = uint[4](0x2a3b3f18u, 0x174f3227u, 0x3d261c4fu, 0x4c006738u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ4_T32)
#define DATA_A_GGML_EXT
#define QUANT_K 32
#define EXT_ROTATION 32
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[9]; };
#define EXT_TRELLIS_K 4
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x2f251f19u, 0x3309000eu, 0x122b3922u, 0x1628471cu);
const uint ext_trellis_values1[4] = uint[4](0x1d212d18u, 0x23361e25u, 0x1400281au, 0x231b1d20u);
const float ext_trellis_offset = 64.0;
#elif defined(DATA_A_ITQ3_T32)
#define DATA_A_GGML_EXT
#define QUANT_K 32
#define EXT_ROTATION 32
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[7]; };
#define EXT_TRELLIS_K 3
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x1b002710u, 0x1d170d28u, 0x36180e1fu, 0x062e2214u);
const uint ext_trellis_values1[4] = uint[4](0x0f242922u, 0x35152d20u, 0x2e1a1f18u, 0x20420029u);
const float ext_trellis_offset = 60.0;
#elif defined(DATA_A_ITQ2_T32)
#define DATA_A_GGML_EXT
#define QUANT_K 32
#define EXT_ROTATION 32
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[5]; };
#define EXT_TRELLIS_K 2
#define EXT_TRELLIS_V 1
const uint ext_trellis_values0[4] = uint[4](0x344e1726u, 0x25003016u, 0x41152430u, 0x15284039u);
const uint ext_trellis_values1[4] = uint[4](0x0e200a16u, 0x16001c0eu, 0x0c17162cu, 0x1c160e1fu);
const float ext_trellis_offset = 62.0;
#elif defined(DATA_A_DITTO5)
#define DATA_A_GGML_EXT
#define QUANT_K 256
#define EXT_ROTATION 256
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[81]; };
const uint ext_codebook[4] = uint[4](0x49464341u, 0x55524f4cu, 0x635f5b58u, 0x7f756e68u);
const float ext_codebook_offset = 63.5;
#endif
#ifdef DATA_A_GGML_EXT
#define A_TYPE ext_block
#define QUANT_R 1
#endif
#ifdef EXT_INTEGER
#include "q8.glsl"
#endif
