// Shared by metal_stdlib and device.cpp: the threads of a threadgroup as fibers of one thread, and the kernels by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace metal_host {

struct dims { unsigned x, y, z; };

// Built-in values of the running thread.
struct thread_state {
    dims     position, threads;  // of the threadgroup in the grid; threads per threadgroup
    unsigned index;              // of the thread in the threadgroup
    char *   memory;             // threadgroup memory
};
const thread_state & now();
inline unsigned lane() { return now().index % 32; }

uint64_t exchange(uint64_t value, unsigned lane); // called by all lanes of a simdgroup; returns the value of `lane`
void     barrier(int line);                       // for all threads; line: in the source

// A built-in value, convertible to the type that a kernel declares.
struct builtin {
    dims value;
    operator unsigned() const { return value.x; }
    operator unsigned short() const { return (unsigned short) value.x; }
    template <typename V, typename = decltype(V().z)> operator V() const { return V(value.x, value.y, value.z); }
};

typedef std::function<void(void ** buffers)> kernel_function;
std::map<std::string, kernel_function> & kernels();
struct registered {
    registered(const char * name, kernel_function f) { kernels()[name] = std::move(f); }
};

// Setters of function constants by index; each translation unit has its own constants.
std::multimap<int, std::function<void(int)>> & constants();
struct registered_constant {
    template <typename T> registered_constant(int index, T * value) {
        constants().emplace(index, [value](int v) { *value = (T) v; });
    }
};

// Run a kernel for every thread of every threadgroup.
void launch(const kernel_function & kernel, dims grid, dims threads, size_t memory_bytes, void ** buffers);

// order: in which the fibers of a threadgroup run (0 to 2); broken_barrier: line of the barrier to skip (0: none); barriers: number of
// barriers passed by line.
extern int order, broken_barrier;
extern std::map<int, long> barriers;

} // namespace metal_host
