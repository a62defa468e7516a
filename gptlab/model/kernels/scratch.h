// Memory that kernels need while they compute, and what becomes of a function that Python calls where there is too little:
// no exception may leave it, nor a parallel region. So memory is taken before the region.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

// Whether memory ran out in a function that this thread called: its results are then incomplete.
inline thread_local bool ran_out = false;

// That, since the last call of this. Python calls it after each function.
extern "C" __attribute__((used)) inline int memory_ran_out() { return std::exchange(ran_out, false); }

namespace kernels {

// Memory for what the functions of a thread need at one time. It is kept from one to the next, which needs the same again:
// memory from the operating system has to be cleared first, page by page. Pages of 2 MiB, where Linux has them, let more be
// prefetched than those of 4 KiB: an MLP by AMX takes 0.87 to 0.93 of the time (docs/LOG.md, 2026-11-30).
class Arena {
  public:
    static constexpr long LINE = 64, HUGE_PAGE = 2 << 20;  // bytes

    // A piece that begins with a line of the cache.
    void* take(long bytes) {
        bytes = (bytes + LINE - 1) / LINE * LINE;
        if (used + bytes > size) add_block(std::max(bytes, most - taken));
        taken += bytes, pieces++;
        most = std::max(most, taken);
        return blocks.back().get() + std::exchange(used, used + bytes);
    }

    // After the last piece is given back, all memory is free. What did not fit into one block will the next time.
    void give() {
        if (--pieces > 0) return;
        if (blocks.size() > 1) blocks.clear(), size = 0;
        used = taken = 0;
    }

  private:
    struct Delete {
        void operator()(char* block) const { ::operator delete[](block, std::align_val_t(HUGE_PAGE)); }
    };

    void add_block(long bytes) {
        bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        blocks.emplace_back(static_cast<char*>(::operator new[](bytes, std::align_val_t(HUGE_PAGE))));
#ifdef __linux__
        madvise(blocks.back().get(), bytes, MADV_HUGEPAGE);  // where it is refused, pages have 4 KiB
#endif
        size = bytes, used = 0;
    }

    std::vector<std::unique_ptr<char[], Delete>> blocks;
    long size = 0, used = 0;  // bytes of the last block
    long taken = 0, most = 0, pieces = 0;
};

inline thread_local Arena arena;

}  // namespace kernels

namespace {

// Bytes of a piece from which its memory is kept. Smaller pieces are better where tensors just were that are no longer needed,
// in the second cache: with those from 256 KiB in the arena, a step of 4 x 128 takes 1.08 times as long (docs/LOG.md,
// 2026-11-30).
constexpr long LEAST_KEPT = kernels::Arena::HUGE_PAGE;

struct Free {
    bool kept;

    void operator()(void* memory) const {
        if (kept)
            kernels::arena.give();
        else
            ::operator delete[](memory, std::align_val_t(kernels::Arena::LINE));
    }
};

// Memory of the calling thread, which is the one that frees it.
template <class E>
using Memory = std::unique_ptr<E[], Free>;

// Beginning with a line of the cache.
template <class E>
Memory<E> room(long count) {
    const long bytes = count * sizeof(E);
    const bool kept = bytes >= LEAST_KEPT;
    void* memory = kept ? kernels::arena.take(bytes) : ::operator new[](bytes, std::align_val_t(kernels::Arena::LINE));
    return {static_cast<E*>(memory), Free{kept}};
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
