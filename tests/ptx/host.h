// What ggml-cuda.cu gives the sources under test: one device, whose number is that of its architecture in this run, since upstream
// remembers what it has found out of a device.
#pragma once

#include "common.cuh"

#include <stdexcept>

inline int ptx_device_id;

int  ggml_cuda_get_device() { return ptx_device_id; }
void ggml_cuda_set_device(int) {}

// Python has the reason.
void ggml_cuda_error(const char * stmt, const char * func, const char *, int, const char * msg) {
    throw std::runtime_error(std::string(func) + ": " + stmt + ": " + msg);
}

// f(), 1 if a launch failed
template <typename F> static int checked(F f) {
    try {
        f();
        return 0;
    } catch (const std::runtime_error &) {
        return 1;
    }
}
