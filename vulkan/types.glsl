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
const uint ext_trellis_values0[4] = uint[4](0x344e1726u, 0x25003016u, 0x41152430u, 0x15284039u);
const uint ext_trellis_values1[4] = uint[4](0x0e200a16u, 0x16001c0eu, 0x0c17162cu, 0x1c160e1fu);
const float ext_trellis_offset = 62.0;
#elif defined(DATA_A_ITQ4_T64)
#define DATA_A_GGML_EXT
#define QUANT_K 64
#define EXT_ROTATION 64
#define EXT_WORD_BITS 16
struct ext_block { uint16_t w[17]; };
#define EXT_TRELLIS_K 4
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
