// What every type's header needs: half floats, QK_K, the unpack contract.
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
#define GGML_COMMON_DECL_CPP
#else
#define GGML_COMMON_DECL_C
#endif
#include "ggml-common.h"
#include "ggml-ext.h"

#define GGML_EXT_MAX_GROUPS 4

// Activation blocks whose largest rotated magnitude is below this are zero: 127/amax would overflow.
#define GGML_EXT_ACT_TINY 1e-36f

// One block after unpacking, the same integers on every backend:
//   value[j] = d * scale[j / group] * (q[j] - offset)
// group is the type's entry in types.toml; types with one scale set scale[0] = 1. Rotated types hold rotated values.
struct ggml_ext_unpacked {
    int8_t  q[QK_K];
    int32_t scale[GGML_EXT_MAX_GROUPS];
    float   d;
    float   offset;
};

static inline bool ggml_ext_half_is_finite(ggml_half h) {
    uint16_t bits;
    memcpy(&bits, &h, sizeof(bits));
    return (bits & 0x7c00) != 0x7c00;
}
