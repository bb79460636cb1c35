// The part of the CUDA runtime that upstream's launches need. Memory and launches go to Python, which interprets the kernels (device.py).
// The host code under test runs unmodified, so grids, parameters and shared memory are its own.
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <unordered_map>

struct kernel_entry {
    std::string name;
    int         shared_limit = 48*1024; // default limit of dynamic shared memory
};

struct callbacks {
    // Returns 0 on success; grid and block have three entries each.
    int (*launch)(const char * name, const unsigned * grid, const unsigned * block, size_t shared, int shared_limit, int programmatic,
                  void ** args);
    void * (*alloc)(size_t size);
    void (*free)(void * p);
    void (*written)(const void * p, size_t size); // the host wrote there
};

static callbacks python;
static int       compute_capability; // 10*major + minor
static std::unordered_map<const void *, kernel_entry> & kernels() {
    static std::unordered_map<const void *, kernel_entry> map;
    return map;
}

static struct { dim3 grid, block; size_t shared; } configuration; // of the next launch

static cudaError_t launch(const void * function, dim3 grid, dim3 block, size_t shared, int programmatic, void ** args) {
    const auto kernel = kernels().find(function);
    if (kernel == kernels().end()) {
        return cudaErrorInvalidDeviceFunction;
    }
    const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    return python.launch(kernel->second.name.c_str(), g, b, shared, kernel->second.shared_limit, programmatic, args) ? cudaErrorLaunchFailure
                                                                                                                     : cudaSuccess;
}

extern "C" {

void ptx_runtime(const callbacks * c, int cc) { python = *c; compute_capability = cc; }

void ** __cudaRegisterFatBinary(void *) { static void * handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **, const char * function, char *, const char * name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    kernels()[function].name = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *) {
    configuration = {grid, block, shared};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared, void * stream) {
    *grid = configuration.grid; *block = configuration.block; *shared = configuration.shared; *(void **) stream = nullptr;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void * f, dim3 grid, dim3 block, void ** args, size_t shared, cudaStream_t) {
    return launch(f, grid, block, shared, 0, args);
}
// called by nvcc 13's host code instead of cudaLaunchKernel; here a kernel handle is its function
cudaError_t __cudaGetKernel(cudaKernel_t * kernel, const void * f) { *kernel = (cudaKernel_t) f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void ** args, size_t shared, cudaStream_t) {
    return launch((const void *) kernel, grid, block, shared, 0, args);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * c, const void * f, void ** args) {
    int programmatic = 0;
    for (unsigned i = 0; i < c->numAttrs; ++i) {
        programmatic |= c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization && c->attrs[i].val.programmaticStreamSerializationAllowed;
    }
    return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, programmatic, args);
}

cudaError_t cudaFuncSetAttribute(const void * f, cudaFuncAttribute what, int value) {
    if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        kernels()[f].shared_limit = value;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * out, const void *) {
    memset(out, 0, sizeof(*out));
    out->ptxVersion = out->binaryVersion = compute_capability;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int * id) { *id = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, unsigned) { *s = (cudaStream_t) 1; return cudaSuccess; }
const char * cudaGetErrorString(cudaError_t e) { return e == cudaErrorLaunchFailure ? "the kernel failed" : "CUDA runtime error"; }

cudaError_t cudaMalloc(void ** p, size_t size) { *p = python.alloc(size); return *p ? cudaSuccess : cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void * p) { python.free(p); return cudaSuccess; }
cudaError_t cudaMemcpy(void * to, const void * from, size_t size, cudaMemcpyKind) {
    memcpy(to, from, size);
    python.written(to, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemset(void * p, int value, size_t size) {
    memset(p, value, size);
    python.written(p, size);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void * p, int value, size_t size, cudaStream_t) { return cudaMemset(p, value, size); }

}
