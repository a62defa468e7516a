// Linear layers without bias on a CPU.

#pragma once

#include "panels.h"

#include <algorithm>
#include <climits>

namespace {

// Gradients of weights take a slice of rows at a time. In bfloat16 it has SLICE_ELEMENTS of the wider operand, or at least
// SLICE_ROWS rows. In float32 it has SUMMED_ROWS rows for each pair of threads, and sums are added to the result after each
// SUMMED_ROWS, so that the bits do not depend on the number of threads.
//
// Few rows stay in the second cache, where a thread reads them again and again. On Zen 3, where it is small, slices of
// 4,096 rows made an MLP's backward pass in float32 take 1.15 to 1.36 times as long. In bfloat16 few rows take 1 to 2%
// longer on Zen 5 (docs/LOG.md, 2026-11-25 and 2026-11-26). By AMX, whose products wait for what is not in that cache,
// slices of 4,096 rows made it take 1.27 times as long as slices of 512 (2026-11-28), and slices of 256 rows of a hidden
// layer of 1,536, for each of which weights and their gradients are read, 1.17 times (2026-11-29).
constexpr long SLICE_ELEMENTS = BY_AMX ? 1 << 18 : 1 << 22, SLICE_ROWS = BY_AMX ? 512 : 256;
constexpr long SUMMED_ROWS = PAIRS ? LONG_MAX : 10 * HEIGHT;

long slice_of(long rows, long width, int threads) {
    const long most = PAIRS ? std::max(SLICE_ELEMENTS / width, SLICE_ROWS) : (threads + 1) / 2 * SUMMED_ROWS;
    return round_up(std::min(rows, most), MR);
}

// x (height, width), at most HEIGHT rows that are `stride` apart, times panels: at(row, column, n, v) for each vector v of
// the product, n numbers of which count. spare: room for all rows.
template <class At>
void multiply_rows(const real* x, long stride, long height, long width, const unit* panels, long columns, unit* spare,
                   At at) {
    const long depth = units_of(width), tiles = tiles_of(height);
    const auto* rows = reinterpret_cast<const unit*>(x);
    long a_row = stride / PER_UNIT;
    if (height < tiles * MR || width % PER_UNIT || stride % PER_UNIT) {
        pack_rows(x, stride, height, width, tiles, spare);
        rows = spare, a_row = depth;
    }
    multiply(height, depth, rows, a_row, panels, columns, at);
}

// What stores a product in y (height, columns).
auto into(real* y, long columns) {
    return [=](long r, long c, auto n, vec v) { store_part(y + r * columns + c, v, n); };
}

struct Layer {
    long rows, inputs, outputs, x_stride;  // rows of x are so far apart
};

// The gradient of a weight (outputs, inputs), and that of x: at(row, column, n, v) for each vector v of it, n numbers of
// which count. dy_of(first, rows): the gradients of the layer's results from the row `first` on, of which those of `rows`
// have to be there when the thread returns, which are others for each thread, and those of its slice when all have.
template <class Rows, class At>
void linear_backward(const Layer& s, const real* x, const float* weight, Rows dy_of, float* dweight, int threads, At at) {
    const long depth = units_of(s.outputs), panels = panels_of(s.inputs);
    const long slice = slice_of(s.rows, std::max(s.inputs, s.outputs), threads);
    const bool x_left = x_is_left(s.outputs, s.inputs);
    const auto down = room<unit>(panels * depth * NR);                         // the weights
    const auto xs = room<unit>(panels * units_of(slice) * NR);                 // a slice of x
    const auto dys = room<unit>(round_up(s.outputs, LEFT) * units_of(slice));  // and of dy
    const int most = team(s.rows * s.outputs, threads);
    const Rooms<unit> spares(most, HEIGHT * depth);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n = omp_get_num_threads();
        const Registers registers{};
        unit* spare = spares.own();
        pack<NR>(weight, s.inputs, s.outputs, s.inputs, Share(depth, thread, n), depth, down.get());
        for (long first = 0; first < s.rows; first += slice) {
            const long here = std::min(slice, s.rows - first), units = depth_of(here);
            const Share share = depth_share(units, thread, n);
            const Share rows(std::min(share.first * PER_UNIT, here), std::min(share.last * PER_UNIT, here));
            const real *x_here = x + first * s.x_stride, *dy_here = dy_of(first, rows);
            pack_outer<NR>(x_here, s.x_stride, here, s.inputs, share, units, x_left, xs.get());
            pack_outer<LEFT>(dy_here, s.outputs, here, s.outputs, share, units, !x_left, dys.get());
#pragma omp barrier
            const OuterProduct of_weight[] = {{dys.get(), xs.get(), s.outputs, s.inputs, dweight}};
            const OuterProducts<1> products{of_weight, units, SUMMED_ROWS, first == 0};
            const RowBlocks<> blocks(here);
            tasks.each(blocks.count() + products.count(), [&](long task) {
                if (task >= blocks.count()) return products.of(task - blocks.count());
                blocks.of(task, [&](long row, long height) {
                    multiply_rows(dy_here + row * s.outputs, s.outputs, height, s.outputs, down.get(), s.inputs, spare,
                                  [&](long r, long c, auto count, vec v) { at(first + row + r, c, count, v); });
                });
            });
        }
    }
}

}  // namespace
