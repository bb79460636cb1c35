// Stands in for ggml-cuda.cu: a single device. Its number is unique to its architecture, because upstream caches properties per device.
#pragma once

#include "common.cuh"

#include <stdexcept>

inline int ptx_device_id;

int  ggml_cuda_get_device() { return ptx_device_id; }
void ggml_cuda_set_device(int) {}

// Python knows the reason and raises it.
void ggml_cuda_error(const char * stmt, const char * func, const char *, int, const char * msg) {
    throw std::runtime_error(std::string(func) + ": " + stmt + ": " + msg);
}

// Call f and return 1 if a launch failed.
template <typename F> static int checked(F f) {
    try {
        f();
        return 0;
    } catch (const std::runtime_error &) {
        return 1;
    }
}
