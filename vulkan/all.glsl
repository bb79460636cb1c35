// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Unpacks the type that a shader is compiled for.
#if defined(EXT_TRELLIS_K)
#include "trellis.glsl"
#elif defined(DATA_A_ITQ3_S)
#include "itq3_s.glsl"
#elif defined(DATA_A_CCQ2)
#include "ccq2.glsl"
#elif defined(DATA_A_DITTO3)
#include "ditto3.glsl"
#elif defined(DATA_A_DITTO5)
#include "ditto5.glsl"
#endif
