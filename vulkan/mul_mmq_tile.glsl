// The tile of upstream's mul_mmq: groups of 32 weights, those of thread k of a block (unpack.glsl). BK_STEP threads load a row of the tile.
#include "unpack.glsl"
#define QUANT_R_MMQ (8/BK_STEP)
struct block_a_cache {
    int   qs[8];
    float d;
#ifdef EXT_OFFSET
    float offset;
#endif
#ifdef EXT_GROUP_SCALE
    uint  scales; // a byte for two words
#endif
};
