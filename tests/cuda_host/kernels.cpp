// tests/gpu/kernels.cu as host code, to test it without a GPU.
#include "runtime.h"

#include "../gpu/kernels.cu"
