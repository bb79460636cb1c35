#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>

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

struct fiber {
    ucontext_t   context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    thread_state state;
    int          n_exchanges, n_barriers; // begun
    uint64_t     given[2]; // of the last two exchanges: a lane is never further ahead
    bool         done;
    enum { STACK_BYTES = 1 << 17 };
};

std::vector<fiber> fibers;
size_t             n_fibers, current;
ucontext_t         scheduler;
const kernel_function * kernel_now;
void **            buffers_now;

void run_fiber() {
    (*kernel_now)(buffers_now);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

[[noreturn]] void fail(const char * what) {
    fprintf(stderr, "metal_host: %s\n", what);
    abort();
}

void wait() {
    swapcontext(&fibers[current].context, &scheduler);
}

void run_threadgroup() {
    for (size_t i = 0; i < n_fibers; ++i) {
        fiber & f = fibers[i];
        f.n_exchanges = f.n_barriers = 0;
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp   = f.stack.get();
        f.context.uc_stack.ss_size = fiber::STACK_BYTES;
        makecontext(&f.context, run_fiber, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (size_t j = 0; j < n_fibers; ++j) {
            current = order == 0 ? j : order == 1 ? n_fibers - 1 - j : (j*37 + 11) % n_fibers; // 37 is prime to multiples of 32
            if (!fibers[current].done) {
                running = true;
                swapcontext(&scheduler, &fibers[current].context);
            }
        }
    }
}

} // namespace

const thread_state & now() {
    return fibers[current].state;
}

uint64_t exchange(uint64_t value, unsigned lane) {
    fiber & me = fibers[current];
    const size_t begin = current/32*32;
    const int n = me.n_exchanges++;
    me.given[n % 2] = value;
    for (size_t i = begin; i < begin + 32; ++i) {
        while (fibers[i].n_exchanges <= n) {
            if (fibers[i].done) {
                fail("a lane left before a shuffle of its simdgroup");
            }
            wait();
        }
    }
    return fibers[begin + lane].given[n % 2];
}

void barrier(int line) {
    ++barriers[line];
    if (line == broken_barrier) {
        return;
    }
    const int n = fibers[current].n_barriers++;
    for (size_t i = 0; i < n_fibers; ++i) {
        while (fibers[i].n_barriers <= n) {
            if (fibers[i].done) {
                fail("a thread left before a barrier of its threadgroup");
            }
            wait();
        }
    }
}

void launch(const kernel_function & kernel, dims grid, dims threads, size_t memory_bytes, void ** buffers) {
    n_fibers = (size_t) threads.x*threads.y*threads.z;
    if (fibers.size() < n_fibers) {
        fibers = std::vector<fiber>(n_fibers);
    }
    kernel_now  = &kernel;
    buffers_now = buffers;
    std::unique_ptr<char[]> memory(new char[memory_bytes + 64]);
    char * aligned = (char *) (((uintptr_t) memory.get() + 63) & ~(uintptr_t) 63);
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                memset(aligned, 0xa5, memory_bytes); // what a threadgroup finds is not what it wrote
                for (size_t i = 0; i < n_fibers; ++i) {
                    fibers[i].state = {{x, y, z}, threads, (unsigned) i, aligned};
                }
                run_threadgroup();
            }
        }
    }
}

} // namespace metal_host
