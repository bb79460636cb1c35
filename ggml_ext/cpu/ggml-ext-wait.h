// How the threads of a pool wait for each other (docs/maintaining/waiting.md). The waiting thread spins, because most waits are shorter than
// falling asleep. It stops spinning in two cases:
//   - Another thread of the pool was last seen on the waiting thread's CPU. That other thread cannot arrive before it gets the CPU.
//   - GGML_EXT_SPIN_US have passed. Probably another program runs on the CPU of the late thread. The waiting thread sleeps, and the scheduler
//     can move the late thread to the freed CPU.
// On a quiet machine, barriers make no system calls.
// ggml-cpu.c includes this file after it defines its mutexes; OpenMP builds keep OpenMP's barrier.
#pragma once

#ifndef GGML_USE_OPENMP

#if defined(__linux__)
#include <sched.h>
#endif

#define GGML_EXT_SPIN_US   200 // falling asleep and waking take a fraction of this; a scheduler's time slice is ten times as long
#define GGML_EXT_POLL_US   20  // spinning between graphs, per level of --poll; the default level of 50 gives 1 ms
#define GGML_EXT_SPIN_STEP 16  // reads of the value per reading of the clock

static inline void ggml_thread_cpu_relax(void);

struct ggml_ext_waiters {
    ggml_mutex_t mutex;
    ggml_cond_t  cond;
    atomic_int   n_asleep;                // threads that sleep
    atomic_int   cpu[GGML_MAX_N_THREADS]; // on which each thread of the pool was last seen, -1 if unknown
};

static _Thread_local int ggml_ext_ith; // this thread's index in the pool

static inline void ggml_ext_waiters_init(struct ggml_ext_waiters * w) {
    ggml_mutex_init(&w->mutex);
    ggml_cond_init(&w->cond);
    w->n_asleep = 0;
    for (int i = 0; i < GGML_MAX_N_THREADS; i++) {
        w->cpu[i] = -1;
    }
}

static inline void ggml_ext_waiters_free(struct ggml_ext_waiters * w) {
    ggml_mutex_destroy(&w->mutex);
    ggml_cond_destroy(&w->cond);
}

// Record the CPU of the calling thread and return the CPU. An unchanged CPU is not stored again, so that the cache line stays shared.
static inline int ggml_ext_record_cpu(struct ggml_ext_waiters * w) {
#if defined(__linux__)
    const int cpu = sched_getcpu();
#elif defined(_WIN32)
    const int cpu = (int) GetCurrentProcessorNumber();
#else
    const int cpu = -1;
#endif
    if (atomic_load_explicit(&w->cpu[ggml_ext_ith], memory_order_relaxed) != cpu) {
        atomic_store_explicit(&w->cpu[ggml_ext_ith], cpu, memory_order_relaxed);
    }
    return cpu;
}

// Whether one of the other n - 1 threads was last seen on the calling thread's CPU.
static inline bool ggml_ext_shares_cpu(struct ggml_ext_waiters * w, int n) {
    const int cpu = ggml_ext_record_cpu(w);
    for (int i = 0; i < n && cpu >= 0; i++) {
        if (i != ggml_ext_ith && atomic_load_explicit(&w->cpu[i], memory_order_relaxed) == cpu) {
            return true;
        }
    }
    return false;
}

// How long thread ith polls for the next graph. A thread that had no part in the last one sleeps at once.
static inline int64_t ggml_ext_poll_us(uint32_t poll, int ith, int n_active) {
    return ith < n_active ? (int64_t) GGML_EXT_POLL_US*poll : 0;
}

// Sleep until *value is not `old`.
static inline void ggml_ext_sleep(struct ggml_ext_waiters * w, const atomic_int * value, int old) {
    ggml_mutex_lock_shared(&w->mutex);
    atomic_fetch_add_explicit(&w->n_asleep, 1, memory_order_seq_cst);
    while (atomic_load_explicit(value, memory_order_seq_cst) == old) {
        ggml_cond_wait(&w->cond, &w->mutex);
    }
    atomic_fetch_sub_explicit(&w->n_asleep, 1, memory_order_relaxed);
    ggml_mutex_unlock_shared(&w->mutex);
    ggml_ext_record_cpu(w);
}

// Wait until *value, which another of n threads changes, is not `old`.
static inline void ggml_ext_wait(struct ggml_ext_waiters * w, const atomic_int * value, int old, int n) {
    int64_t end = 0;
    for (int i = 1; atomic_load_explicit(value, memory_order_relaxed) == old; i++) {
        ggml_thread_cpu_relax();
        if (i % GGML_EXT_SPIN_STEP != 0) {
            continue;
        }
        const int64_t now = ggml_time_us();
        if (end == 0) {
            end = now + GGML_EXT_SPIN_US;
        }
        if (now >= end || ggml_ext_shares_cpu(w, n)) {
            ggml_ext_sleep(w, value, old);
            return;
        }
    }
}

// Wake the sleeping threads. The caller has changed the value with memory_order_seq_cst. A thread that falls asleep now either is counted in
// n_asleep before the load below, or reads the changed value.
static inline void ggml_ext_wake(struct ggml_ext_waiters * w) {
    if (atomic_load_explicit(&w->n_asleep, memory_order_seq_cst) > 0) {
        ggml_mutex_lock(&w->mutex); // a thread that holds the mutex has read the value, but does not wait for the condition yet
        ggml_mutex_unlock(&w->mutex);
        ggml_cond_broadcast(&w->cond);
    }
}

#endif
