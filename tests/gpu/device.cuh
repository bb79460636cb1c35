// What kernels.cu's checks and timings share: memory on the device, graphs, numbers.
#pragma once

#include "common.cuh"

#include <random>

static bool few = false; // --few: little data

// Memory on the device, of whole words as buffers of tensors are: unpack.cuh may read the last one's padding.
template <typename T> struct buffer {
    T *    data;
    size_t n;
    explicit buffer(size_t n) : n(n) {
        CUDA_CHECK(cudaMalloc((void **) &data, (n*sizeof(T) + 3)/4*4));
        CUDA_CHECK(cudaMemset(data, 0x55, n*sizeof(T)));
    }
    explicit buffer(const std::vector<T> & from) : buffer(from.size()) {
        CUDA_CHECK(cudaMemcpy(data, from.data(), n*sizeof(T), cudaMemcpyHostToDevice));
    }
    buffer(const buffer &) = delete;
    ~buffer() { cudaFree(data); }
    std::vector<T> get() const {
        std::vector<T> out(n);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(out.data(), data, n*sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};

// What f puts on a stream, to be launched as one.
struct captured_graph {
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    template <typename F> captured_graph(cudaStream_t stream, F f) {
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        f();
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
    }
    captured_graph(const captured_graph &) = delete;
    ~captured_graph() {
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
};

static std::mt19937 rng(20261121);

static std::vector<float> gaussian(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float & v : x) {
        v = normal(rng);
    }
    return x;
}
