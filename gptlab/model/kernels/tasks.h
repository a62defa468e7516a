// How the threads of a parallel region divide tasks among them.

#pragma once

#include "vectors.h"

#include <atomic>
#include <memory>

namespace {

// A thread's share of a parallel region's work.
struct Share {
    long first, last;

    Share(long first, long last) : first(first), last(last) {}
    Share(long count, long thread, long threads) : first(count * thread / threads), last(count * (thread + 1) / threads) {}
};

// Tasks of which each thread takes its own share, one after the other, and then those that others have not begun: what it
// computed before is in its cache, and nobody waits long for a thread whose core another program uses, or is a slow one.
class Tasks {
  public:
    explicit Tasks(long threads) : begun(new Count[threads]) {}

    // body(task) for 0 <= task < count, in some thread. All threads of the team call it, and when it returns, all tasks are
    // done.
    template <class Body>
    void each(long count, Body body) {
        const long own = omp_get_thread_num(), threads = omp_get_num_threads();
        const int set = begun[own].calls++ % 2;  // the other one may not yet be 0 in all threads
        for (long i = 0; i < threads; i++) {
            const long whose = (own + i) % threads;
            const Share share(count, whose, threads);
            for (long task; (task = share.first + begun[whose].tasks[set]++) < share.last;) body(task);
        }
#pragma omp barrier
        begun[own].tasks[set] = 0;
    }

  private:
    struct alignas(64) Count {
        std::atomic<long> tasks[2] = {};
        long calls = 0;
    };
    std::unique_ptr<Count[]> begun;
};

}  // namespace
