// Run the threads of a Metal threadgroup or CUDA block on one CPU thread: each runs until it waits for others. 32 neighbours form a warp.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace fibers {

struct fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    int        n_exchanges, n_barriers; // started
    uint64_t   values[2]; // of the last two exchanges: no lane is further ahead
    bool       done;
    enum { STACK_BYTES = 1 << 17 };
};

inline std::vector<fiber>    all;
inline size_t                n_running, current;
inline ucontext_t            scheduler;
inline std::function<void()> current_body;

inline void run_one() {
    current_body();
    all[current].done = true;
    swapcontext(&all[current].context, &scheduler);
}

[[noreturn]] inline void fail(const char * what) {
    fprintf(stderr, "fibers: %s\n", what);
    abort();
}

inline void wait() {
    swapcontext(&all[current].context, &scheduler);
}

// Run n threads until all return. turn(j): the thread with the j-th turn; resumed(i): called before thread i continues.
template <typename Turn, typename Resumed>
void run(size_t n, const std::function<void()> & body, Turn turn, Resumed resumed) {
    if (all.size() < n) {
        all = std::vector<fiber>(n);
    }
    n_running = n;
    current_body  = body;
    for (size_t i = 0; i < n; ++i) {
        fiber & f = all[i];
        f.n_exchanges = f.n_barriers = 0;
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp   = f.stack.get();
        f.context.uc_stack.ss_size = fiber::STACK_BYTES;
        makecontext(&f.context, run_one, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (size_t j = 0; j < n; ++j) {
            current = turn(j);
            if (!all[current].done) {
                running = true;
                resumed(current);
                swapcontext(&scheduler, &all[current].context);
            }
        }
    }
}

// Exchange values within a warp: return the value of `lane`.
inline uint64_t exchange(uint64_t value, unsigned lane) {
    fiber & me = all[current];
    const size_t begin = current/32*32;
    const int n = me.n_exchanges++;
    me.values[n % 2] = value;
    for (size_t i = begin; i < begin + 32; ++i) {
        while (all[i].n_exchanges <= n) {
            if (all[i].done) {
                fail("a lane left before a shuffle of its 32");
            }
            wait();
        }
    }
    return all[begin + lane].values[n % 2];
}

inline void barrier() {
    const int n = all[current].n_barriers++;
    for (size_t i = 0; i < n_running; ++i) {
        while (all[i].n_barriers <= n) {
            if (all[i].done) {
                fail("a thread left before a barrier of all");
            }
            wait();
        }
    }
}

} // namespace fibers
