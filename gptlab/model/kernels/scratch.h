// Memory that kernels need while they compute, and what becomes of a function that Python calls where there is too little:
// no exception may leave it, nor a parallel region. So memory is taken before the region.

#pragma once

#include "vectors.h"

#include <memory>
#include <new>
#include <utility>

// Whether memory ran out in a function that this thread called: its results are then incomplete.
inline thread_local bool ran_out = false;

// That, since the last call of this. Python calls it after each function.
extern "C" __attribute__((used)) inline int memory_ran_out() { return std::exchange(ran_out, false); }

namespace {

struct Free {
    void operator()(void* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};

template <class E>
using Memory = std::unique_ptr<E[], Free>;

// Beginning with a line of the cache.
template <class E>
Memory<E> room(long count) {
    return Memory<E>(static_cast<E*>(::operator new[](count * sizeof(E), std::align_val_t(64))));
}

// For `count` elements of each thread of a team.
template <class E>
class Rooms {
  public:
    Rooms(long threads, long count) : each(round_up(count, 64)), memory(room<E>(threads * each)) {}

    E* own() const { return memory.get() + omp_get_thread_num() * each; }

  private:
    long each;
    Memory<E> memory;
};

}  // namespace
