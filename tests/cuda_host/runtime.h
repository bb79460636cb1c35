// What tests/gpu/kernels.cu uses of CUDA's runtime, on the host: memory is memory, launches have ended when they return, a
// graph is the list of launches that were captured.
#pragma once

#include "common.cuh"

#include <chrono>
#include <cstring>
#include <vector>

typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0;
#define CUDA_CHECK(call) GGML_ASSERT((call) == cudaSuccess)

enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
static inline cudaError_t cudaMalloc(void ** p, size_t n) { *p = aligned_alloc(256, (n + 255)/256*256); return *p ? 0 : 2; }
static inline cudaError_t cudaFree(void * p) { free(p); return 0; }
static inline cudaError_t cudaMemset(void * p, int value, size_t n) { memset(p, value, n); return 0; }
static inline cudaError_t cudaMemcpy(void * to, const void * from, size_t n, int) { memcpy(to, from, n); return 0; }
static inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, int) { memcpy(to, from, n); return 0; }
static inline cudaError_t cudaDeviceSynchronize() { return 0; }

enum { cudaStreamNonBlocking, cudaStreamCaptureModeThreadLocal };
static inline cudaError_t cudaStreamCreate(cudaStream_t * s) { *s = nullptr; return 0; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, int) { *s = nullptr; return 0; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return 0; }
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return 0; }

typedef std::vector<std::function<void()>> * cudaGraph_t;
typedef cudaGraph_t cudaGraphExec_t;
void cuda_host_capture(cudaGraph_t graph); // of the launches from now on; nullptr ends it
static cudaGraph_t cuda_host_graph;
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
    cuda_host_capture(cuda_host_graph = new std::vector<std::function<void()>>);
    return 0;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t * g) { cuda_host_capture(nullptr); *g = cuda_host_graph; return 0; }
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t * e, cudaGraph_t g, void *, void *, size_t) { *e = g; return 0; }
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return 0; }
static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { delete g; return 0; }
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) {
    for (const auto & launch : *e) {
        launch();
    }
    return 0;
}

typedef std::chrono::steady_clock::time_point cudaEvent_t;
static inline cudaError_t cudaEventCreate(cudaEvent_t *) { return 0; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t) { return 0; }
static inline cudaError_t cudaEventRecord(cudaEvent_t & e, cudaStream_t = nullptr) { e = std::chrono::steady_clock::now(); return 0; }
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return 0; }
static inline cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = std::chrono::duration<float, std::milli>(to - from).count();
    return 0;
}

static inline float __bfloat162float(nv_bfloat16 x) { return ggml_bf16_to_fp32(x.bits); }
