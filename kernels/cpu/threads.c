/* Threads that share out the items of a loop.
 *
 * Two things differ from OpenMP, both because a server's cores are not its own: routers, fronts and other engines run on
 * them too. The caller never waits for a thread that has not begun: shares are claimed one by one, and if a helper was
 * descheduled the caller does its shares as well. And a helper that finds nothing to do looks for SPIN_CYCLES, which
 * bridges the gap between two kernels of a step, then sleeps. (OpenMP waits for every thread at the end of every loop;
 * one busy process beside it made a decode step seven times as slow, and spinning for long took the core from others.)
 *
 * One loop runs at a time. A second caller meanwhile does its loop alone, on its own thread.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPIN_CYCLES 400000 /* about 150 us */

/* What can be claimed: the number of shares (high half) and the next one (low half). A thread adds one and has a share if
 * there was one. Both are in one word, so that a late helper cannot mistake one loop's share for another's. */
static _Atomic uint64_t claims;
static _Atomic long finished; /* shares */
static _Atomic uint32_t loops; /* started so far; sleepers wait for it to change */
static _Atomic int sleepers;
static _Atomic int helpers; /* threads that may help, the caller not counted */
static int started;         /* helper threads that exist */

static share current_work;
static const void *current_job;
static long current_items, current_size;
static pthread_mutex_t one_loop = PTHREAD_MUTEX_INITIALIZER;

#define SHARES(word) ((long)((word) >> 32))
#define NEXT(word) ((long)((word) & 0xffffffff))

/* Does shares until none is left to claim. */
static void help(void) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&claims, memory_order_acquire);
        if (NEXT(seen) >= SHARES(seen)) return;
        seen = atomic_fetch_add_explicit(&claims, 1, memory_order_acq_rel);
        if (NEXT(seen) >= SHARES(seen)) return;
        /* The loop cannot end, and what describes it cannot change, before this share is finished. */
        long begin = NEXT(seen) * current_size, end = begin + current_size;
        current_work(current_job, begin, end < current_items ? end : current_items);
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    }
}

static void *helper(void *argument) {
    int number = (int)(intptr_t)argument;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&loops, memory_order_acquire);
        if (number < atomic_load_explicit(&helpers, memory_order_relaxed)) {
            help();
            uint64_t since = __rdtsc();
            while (atomic_load_explicit(&loops, memory_order_acquire) == seen && __rdtsc() - since < SPIN_CYCLES)
                _mm_pause();
        }
        if (atomic_load_explicit(&loops, memory_order_acquire) == seen) {
            atomic_fetch_add(&sleepers, 1);
            syscall(SYS_futex, &loops, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&sleepers, 1);
        }
    }
    return NULL;
}

/* How many threads work on a loop, the caller included. Fewer are used where they cannot be had. */
void baton_set_threads(int count) {
    pthread_mutex_lock(&one_loop);
    if (count > MAX_THREADS) count = MAX_THREADS;
    while (started < count - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)started) != 0) break;
        pthread_detach(thread);
        started++;
    }
    atomic_store(&helpers, count - 1 < started ? count - 1 : started);
    pthread_mutex_unlock(&one_loop);
}

long even_share(long items) {
    long threads = atomic_load_explicit(&helpers, memory_order_relaxed) + 1, shares = 4 * threads;
    return threads == 1 || items <= 0 ? items : (items + shares - 1) / shares;
}

void do_parallel(share work, const void *job, long items, long size) {
    if (items <= 0) return;
    long shares = (items + size - 1) / size;
    if (shares == 1 || atomic_load_explicit(&helpers, memory_order_relaxed) == 0 ||
        pthread_mutex_trylock(&one_loop) != 0) {
        work(job, 0, items);
        return;
    }
    current_work = work;
    current_job = job;
    current_items = items;
    current_size = size;
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    atomic_store_explicit(&claims, (uint64_t)shares << 32, memory_order_release);
    atomic_fetch_add(&loops, 1);
    if (atomic_load(&sleepers) > 0) syscall(SYS_futex, &loops, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    help();
    while (atomic_load_explicit(&finished, memory_order_acquire) < shares) _mm_pause();
    pthread_mutex_unlock(&one_loop);
}
