// Timings of kernels.cu, one line of JSON each.
#pragma once

#include "cuda/quantize.cuh"
#include "device.cuh"

#include <cinttypes>

// Milliseconds of f's launches on the stream.
template <typename F> static float milliseconds(cudaStream_t stream, F f) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    CUDA_CHECK(cudaEventRecord(start, stream));
    f();
    CUDA_CHECK(cudaEventRecord(stop, stream));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return ms;
}

// Microseconds of one launch of f, from a graph of many: no gaps between launches.
template <typename F> static double microseconds(F f) {
    const int n_launches = few ? 2 : 200, n_replays = few ? 3 : 20;
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    std::vector<double> times;
    {
        const captured_graph graph(stream, [&] {
            for (int i = 0; i < n_launches; ++i) {
                f(stream);
            }
        });
        for (int i = 0; i < n_replays; ++i) {
            times.push_back(1e3*milliseconds(stream, [&] { CUDA_CHECK(cudaGraphLaunch(graph.exec, stream)); })/n_launches);
        }
    }
    CUDA_CHECK(cudaStreamDestroy(stream));
    std::sort(times.begin(), times.end());
    return times[n_replays/2];
}

static void time_quantize() {
    for (int64_t n : few ? std::vector<int64_t>{256, 512} : std::vector<int64_t>{2048, 4096, 8192, 14336}) {
        const buffer<float> x(gaussian(n));
        const buffer<ggml_ext::block_q8<QK_K>> y(n/QK_K);
        const auto us = [&](ggml_type type) {
            return microseconds([&](cudaStream_t s) { ggml_ext::quantize_row_q8_cuda(x.data, y.data, type, n, n, n, n, n, 1, 1, 1, s); });
        };
        printf("{\"timing\": \"quantize\", \"n\": %" PRId64 ", \"plain_us\": %.3f, \"rotated_us\": %.3f, \"rotated_64_us\": %.3f}\n", n,
               us(GGML_TYPE_CCQ2), us(GGML_TYPE_ITQ3_S), us(GGML_TYPE_ITQ3_T64));
    }
}
