// Replaces upstream's convert.cuh.
#pragma once

#include "common.cuh"

template <typename T> static inline T ggml_cuda_cast(float x);
template <> inline float ggml_cuda_cast<float>(float x) { return x; }
template <> inline half ggml_cuda_cast<half>(float x) { return {ggml_fp32_to_fp16(x)}; }
template <> inline nv_bfloat16 ggml_cuda_cast<nv_bfloat16>(float x) { return {ggml_fp32_to_bf16(x)}; }
