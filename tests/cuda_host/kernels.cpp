// tests/gpu/kernels.cu as host code: the rehearsal of what scripts/gpu/gpu_check.py runs on a GPU.
#include "runtime.h"

#include "../gpu/kernels.cu"
