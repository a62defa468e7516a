// Products of rows by the weights of linear layers, and slices of rows for the gradients of weights.

#pragma once

#include "panels.h"

#include <algorithm>
#include <climits>

namespace {

// Gradients of weights take a slice of rows at a time. In bfloat16 and by AMX it has SLICE_ELEMENTS of the wider operand, or
// at least SLICE_ROWS rows. In float32 by vectors it has SUMMED_ROWS rows for each pair of threads, and sums are added to
// the result after each SUMMED_ROWS, so that the bits do not depend on the number of threads.
//
// Few rows stay in the second cache, where a thread reads them again and again. On Zen 3, where it is small, slices of
// 4,096 rows made an MLP's backward pass in float32 take 1.15 to 1.36 times as long. In bfloat16 few rows take 1 to 2%
// longer on Zen 5 (docs/LOG.md, 2026-11-25 and 2026-11-26). By AMX, whose products wait for what is not in that cache,
// slices of 4,096 rows made it take 1.27 times as long as slices of 512 (2026-11-28), and slices of 256 rows of a hidden
// layer of 1,536, for each of which weights and their gradients are read, 1.17 times (2026-11-29).
constexpr long SLICE_ELEMENTS = BY_AMX ? 1 << 18 : 1 << 22, SLICE_ROWS = BY_AMX ? 512 : 256;
constexpr long SUMMED_ROWS = PAIRS || BY_AMX ? LONG_MAX : 10 * HEIGHT;

long slice_of(long rows, long width, int threads) {
    const long most = PAIRS || BY_AMX ? std::max(SLICE_ELEMENTS / width, SLICE_ROWS) : (threads + 1) / 2 * SUMMED_ROWS;
    return round_up(std::min(rows, most), MR);
}

// x (height, width), rows that are `stride` apart, times panels: at(row, column, n, v) for each vector v of the product, n
// numbers of which count. spare: room for all rows, packed.
template <class At>
void multiply_rows(const real* x, long stride, long height, long width, const unit* panels, long columns, unit* spare,
                   At at) {
    const long depth = units_of(width), tiles = tiles_of(height);
    const auto* rows = reinterpret_cast<const unit*>(x);
    long a_row = stride / PER_UNIT;
    if (TERMS > 1 || height < tiles * MR || width % PER_UNIT || stride % PER_UNIT) {
        pack_rows(x, stride, height, width, tiles, spare);
        rows = spare, a_row = depth;
    }
    multiply(height, depth, rows, a_row, panels, columns, at);
}

}  // namespace
