#include "runtime.h"

#include "../native/fibers.h"

#include <cstring>

namespace metal_host {

int order, broken_barrier;
std::map<int, long> barriers;

std::map<std::string, kernel_function> & kernels() {
    static std::map<std::string, kernel_function> all;
    return all;
}
std::multimap<int, std::function<void(int)>> & constants() {
    static std::multimap<int, std::function<void(int)>> all;
    return all;
}

namespace {

std::vector<thread_state> states;

// Three orders for tests; 37 is coprime to multiples of 32.
size_t turn(size_t j, size_t n) {
    return order == 0 ? j : order == 1 ? n - 1 - j : (j*37 + 11) % n;
}

} // namespace

const thread_state & now() {
    return states[fibers::current];
}

uint64_t exchange(uint64_t value, unsigned lane) {
    return fibers::exchange(value, lane);
}

void barrier(int line) {
    ++barriers[line];
    if (line != broken_barrier) {
        fibers::barrier();
    }
}

void launch(const kernel_function & kernel, dims grid, dims threads, size_t memory_bytes, void ** buffers) {
    const size_t n = (size_t) threads.x*threads.y*threads.z;
    states.resize(n);
    std::unique_ptr<char[]> memory(new char[memory_bytes + 64]);
    char * aligned = (char *) (((uintptr_t) memory.get() + 63) & ~(uintptr_t) 63);
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                memset(aligned, 0xa5, memory_bytes); // no data from the previous threadgroup
                for (size_t i = 0; i < n; ++i) {
                    states[i] = {{x, y, z}, threads, (unsigned) i, aligned};
                }
                fibers::run(n, [&] { kernel(buffers); }, [n](size_t j) { return turn(j, n); }, [](size_t) {});
            }
        }
    }
}

} // namespace metal_host
