// The parts of CUDA's runtime that tests/gpu/kernels.cu uses, on the host. Device memory is host memory, launches are synchronous, and
// a graph is the list of captured launches.
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
static inline cudaError_t cudaMemcpy(void * dst, const void * src, size_t n, int) { memcpy(dst, src, n); return 0; }
static inline cudaError_t cudaMemcpyAsync(void * dst, const void * src, size_t n, int) { memcpy(dst, src, n); return 0; }
static inline cudaError_t cudaDeviceSynchronize() { return 0; }

enum { cudaStreamNonBlocking, cudaStreamCaptureModeThreadLocal };
static inline cudaError_t cudaStreamCreate(cudaStream_t * s) { *s = nullptr; return 0; }
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * s, int) { *s = nullptr; return 0; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return 0; }
static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return 0; }

typedef std::vector<std::function<void()>> * cudaGraph_t;
typedef cudaGraph_t cudaGraphExec_t;
void cuda_host_capture(cudaGraph_t graph); // capture launches; nullptr ends the capture
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
static inline cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t start, cudaEvent_t stop) {
    *ms = std::chrono::duration<float, std::milli>(stop - start).count();
    return 0;
}

static inline float __bfloat162float(nv_bfloat16 x) { return ggml_bf16_to_fp32(x.bits); }
