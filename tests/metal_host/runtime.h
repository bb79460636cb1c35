// The threads of a threadgroup as fibers of one thread, and the kernels by name: what metal_stdlib and device.cpp share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace metal_host {

struct dims { unsigned x, y, z; };

// Built-in values of the thread that runs.
struct thread_state {
    dims     position, threads;  // of the threadgroup in the grid; threads of a threadgroup
    unsigned index;              // of the thread in its threadgroup
    char *   memory;             // of the threadgroup
};
const thread_state & now();
inline unsigned lane() { return now().index % 32; }

uint64_t exchange(uint64_t value, unsigned lane); // every lane of the simdgroup gives a value; that of `lane`
void     barrier(int line);                       // of the whole threadgroup, at that line of the source

// A built-in value as whatever type a kernel declares it.
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

// Function constants by index: setters, since each translation unit has its own.
std::multimap<int, std::function<void(int)>> & constants();
struct registered_constant {
    template <typename T> registered_constant(int index, T * value) {
        constants().emplace(index, [value](int v) { *value = (T) v; });
    }
};

// Runs a kernel for every thread of every threadgroup.
void launch(const kernel_function & kernel, dims grid, dims threads, size_t memory_bytes, void ** buffers);

// How: the order in which the fibers of a threadgroup take turns (0 to 2), the line of a barrier that is left out (0: none), and
// how many barriers were passed at which line.
extern int order, broken_barrier;
extern std::map<int, long> barriers;

} // namespace metal_host
