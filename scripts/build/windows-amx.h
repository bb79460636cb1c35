// AMX loads and stores of GCC before 13 convert the stride to long, which has 32 bits on Windows: "not a valid base/index expression".
// windows.cmake includes this file first.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#undef  _tile_loadd
#undef  _tile_stream_loadd
#undef  _tile_stored
#define GGML_EXT_TILE_LOAD(instruction, tile, base, stride) \
    __asm__ volatile(instruction "\t(%0,%1,1), %%tmm" #tile :: "r"((const void *)(base)), "r"((long long)(stride)) : "memory")
#define _tile_loadd(tile, base, stride)        GGML_EXT_TILE_LOAD("tileloadd", tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) GGML_EXT_TILE_LOAD("tileloaddt1", tile, base, stride)
#define GGML_EXT_TILE_STORE(tile, base, stride) \
    __asm__ volatile("tilestored\t%%tmm" #tile ", (%0,%1,1)" :: "r"((void *)(base)), "r"((long long)(stride)) : "memory")
#define _tile_stored(tile, base, stride)       GGML_EXT_TILE_STORE(tile, base, stride) // so that tile may be a macro
#endif
