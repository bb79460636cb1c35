// Launches of kernels as host code: one block of threads at a time, as fibers.
#include "runtime.h"

#include "../native/fibers.h"

#include <climits>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

uint32_t cuda_host_shuffle(uint32_t value, int lane_mask) {
    return (uint32_t) fibers::exchange(value, fibers::current % 32 ^ lane_mask);
}

static cudaGraph_t capturing = nullptr;

void cuda_host_capture(cudaGraph_t graph) { capturing = graph; }

static unsigned last_blocks = UINT_MAX;

void cuda_host_run_last_blocks(unsigned n) { last_blocks = n; }

void cuda_host_launch(dim3 grid, dim3 block, const std::function<void()> & body) {
    GGML_ASSERT(block.x == 32 && "lanes are threadIdx.x");
    GGML_ASSERT(grid.x <= INT32_MAX && grid.y <= UINT16_MAX && grid.z <= UINT16_MAX && "CUDA's largest grid");
    if (capturing) {
        capturing->push_back([=] { cuda_host_launch(grid, block, body); });
        return;
    }
    gridDim = grid;
    blockDim = block;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = grid.x > last_blocks ? grid.x - last_blocks : 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                fibers::run((size_t) block.x*block.y*block.z, body, [](size_t j) { return j; }, [block](size_t i) {
                    threadIdx = dim3(i % block.x, i/block.x % block.y, i/block.x/block.y);
                });
            }
        }
    }
}
