// For ggml-backend.cpp: which devices may run operations on ggml-ext types. Only backends that know the types are asked; all others,
// including those loaded at run time, are refused before they can accept.
#pragma once

#include "ggml-backend.h"
#include "ggml-ext-supports.h"

#include <cstring>

// name: of the backend's registry. An RPC device asks its server, which checks this again. BLAS would dequantize the full matrix for
// every product; the CPU backend is faster for any number of columns (docs/reference/backends.md).
static inline bool ggml_ext_backend_knows_types(const char * name) {
    for (const char * known : {"CPU", "CUDA", "MTL", "Vulkan"}) {
        if (strcmp(name, known) == 0) {
            return true;
        }
    }
    return strncmp(name, "RPC", 3) == 0 && (name[3] == 0 || name[3] == '['); // RPC[host:port]
}

// A device without a registry combines several devices (ggml-backend-meta.cpp), each of which is asked.
static inline bool ggml_ext_device_may_run(ggml_backend_dev_t device, const struct ggml_tensor * op) {
    if (!ggml_ext_op_needs_kernels(op)) {
        return true;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    return reg == nullptr || ggml_ext_backend_knows_types(ggml_backend_reg_name(reg));
}
