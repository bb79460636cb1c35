// Shared by the checks and timings of kernels.cu: device memory, graphs, random numbers.
#pragma once

#include "common.cuh"

#include <random>

static bool few = false; // --few: little data

// Device memory, rounded up to full words as for tensors: unpack.cuh may read the padding.
template <typename T> struct buffer {
    T *    data;
    size_t n;
    explicit buffer(size_t n) : n(n) {
        CUDA_CHECK(cudaMalloc((void **) &data, (n*sizeof(T) + 3)/4*4));
        CUDA_CHECK(cudaMemset(data, 0x55, n*sizeof(T)));
    }
    explicit buffer(const std::vector<T> & values) : buffer(values.size()) {
        CUDA_CHECK(cudaMemcpy(data, values.data(), n*sizeof(T), cudaMemcpyHostToDevice));
    }
    buffer(const buffer &) = delete;
    ~buffer() { cudaFree(data); }
    std::vector<T> get() const {
        std::vector<T> values(n);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(values.data(), data, n*sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
};

// The launches of f on a stream as a CUDA graph.
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
