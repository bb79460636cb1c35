// Which devices are asked whether they run an operation on the extension's types, for ggml-backend.cpp: those of backends that know
// the types. All others, also what is loaded at run time and what a newer llama.cpp brings, are refused before they can say yes.
#pragma once

#include "ggml-backend.h"
#include "ggml-ext-supports.h"

#include <cstring>

// By the names of their registries. An RPC device asks its server, on which this is asked again. BLAS would dequantise a whole matrix for every
// product and multiply in F32: the CPU backend is faster at every number of columns (docs/reference/backends.md).
static inline bool ggml_ext_backend_knows_types(const char * name) {
    for (const char * known : {"CPU", "CUDA", "MTL", "Vulkan"}) {
        if (strcmp(name, known) == 0) {
            return true;
        }
    }
    return strncmp(name, "RPC", 3) == 0 && (name[3] == 0 || name[3] == '['); // RPC[host:port]
}

// A device without a registry is several devices in one (ggml-backend-meta.cpp), each of which is asked.
static inline bool ggml_ext_device_may_run(ggml_backend_dev_t device, const struct ggml_tensor * op) {
    if (!ggml_ext_op_needs_kernels(op)) {
        return true;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    return reg == nullptr || ggml_ext_backend_knows_types(ggml_backend_reg_name(reg));
}
