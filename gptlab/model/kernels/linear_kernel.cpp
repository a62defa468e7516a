// Linear layers without bias on a CPU, and the MLP of a GPT: two of them with an activation between, applied to sums that
// are still in the cache.
//
// Activations are `real`. Weights are float32, rounded to that type when they are packed; sums and the gradients of weights
// are float32. Each element is computed by one thread in a fixed order: the bits do not depend on the number of threads.

#include "activations.h"
#include "layers.h"
#include "parts.h"

#include <algorithm>

namespace {

// x (rows, inputs), weight (outputs, inputs) -> y (rows, outputs)
void linear_forward(const LinearLayer& s, const real* x, const float* weight, real* y, int threads) {
    const long depth = units_of(s.inputs), panels = panels_of(s.outputs);
    const auto up = room<unit>(panels * depth * NR);  // the transposed weights
    const int most = team(s.rows * s.outputs, threads);
    const Rooms<unit> spares(most, HEIGHT * depth);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n = omp_get_num_threads();
        const Registers registers{};
        unit* spare = spares.own();
        pack_transposed(weight, s.outputs, s.inputs, Share(panels, thread, n), up.get());
#pragma omp barrier
        row_blocks(tasks, s.rows, [&](long row, long height) {
            multiply_rows(x + row * s.inputs, s.inputs, height, s.inputs, up.get(), s.outputs, spare,
                          into(y + row * s.outputs, s.outputs));
        });
    }
}

struct MLP {
    long rows, width, hidden;
};

// hidden = A of x up^T, and slope its derivative, unless null; y = hidden out^T, plus residual, unless null. x, residual, y:
// (rows, width).
template <class A>
void mlp_forward(const MLP& s, const real* x, const float* up, const float* out, const real* residual, real* hidden,
                 real* slope, real* y, int threads) {
    const long depth = units_of(s.width), of_hidden = units_of(s.hidden);
    const long wide = panels_of(s.hidden), narrow = panels_of(s.width);
    const auto ups = room<unit>(wide * depth * NR), outs = room<unit>(narrow * of_hidden * NR);
    const int most = team(s.rows * s.hidden, threads);
    const Rooms<unit> spares(most, HEIGHT * std::max(depth, of_hidden));
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n = omp_get_num_threads();
        const Registers registers{};
        unit* spare = spares.own();
        pack_transposed(up, s.hidden, s.width, Share(wide, thread, n), ups.get());
        pack_transposed(out, s.width, s.hidden, Share(narrow, thread, n), outs.get());
#pragma omp barrier
        row_blocks(tasks, s.rows, [&](long row, long height) {
            real *h = hidden + row * s.hidden, *to_slope = slope ? slope + row * s.hidden : nullptr;
            multiply_rows(x + row * s.width, s.width, height, s.width, ups.get(), s.hidden, spare,
                          [=](long r, long c, auto n, vec v) {
                              const Activated at = A::template of<real>(v);
                              store_part(h + r * s.hidden + c, at.value, n);
                              if (to_slope) store_part(to_slope + r * s.hidden + c, at.slope, n);
                          });
            multiply_rows(h, s.hidden, height, s.hidden, outs.get(), s.width, spare, [=](long r, long c, auto n, vec v) {
                const long at = (row + r) * s.width + c;
                store_part(y + at, residual ? rounded<real>(v) + load_part(residual + at, n) : v, n);
            });
        });
    }
}

// slope: null for ReLU^2, whose derivative is 2 sqrt(hidden). Not to write and read it saves 1 to 4% of a step (docs/LOG.md,
// 2026-11-25).
void mlp_backward(const MLP& s, const real* x, const float* up, const float* out, const real* hidden, const real* slope,
                  const real* dy, real* dx, float* dup, float* dout, int threads) {
    const long depth = units_of(s.width), of_hidden = units_of(s.hidden);
    const long wide = panels_of(s.hidden), narrow = panels_of(s.width);
    const long slice = slice_of(s.rows, s.hidden, threads), of_slice = units_of(slice);
    const bool x_left = x_is_left(s.hidden, s.width), hidden_left = x_is_left(s.width, s.hidden);
    const long z_row = wide * NR + NR;  // rows that are a power of two apart would share few places of the cache
    const auto outs = room<unit>(wide * depth * NR), ups = room<unit>(narrow * of_hidden * NR);  // the weights
    const auto xs = room<unit>(narrow * of_slice * NR), hiddens = room<unit>(wide * of_slice * NR);  // a slice of each
    const auto dys = room<unit>(round_up(s.width, LEFT) * of_slice), dzs = room<unit>(round_up(s.hidden, LEFT) * of_slice);
    const int most = team(s.rows * s.hidden, threads);
    const Rooms<unit> spares(most, HEIGHT * std::max(depth, of_hidden));
    Tasks tasks(most);
    const Rooms<real> all_dz(most, HEIGHT * z_row);  // the gradient before the activation, of some rows
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n = omp_get_num_threads();
        const Registers registers{};
        unit* spare = spares.own();
        real* dz = all_dz.own();
        pack<NR>(out, s.hidden, s.width, s.hidden, depth_share(depth, thread, n), depth, outs.get());
        pack<NR>(up, s.width, s.hidden, s.width, depth_share(of_hidden, thread, n), of_hidden, ups.get());
#pragma omp barrier
        for (long first = 0; first < s.rows; first += slice) {
            const long here = std::min(slice, s.rows - first), units = depth_of(here);
            const Share share = depth_share(units, thread, n);
            pack_outer<NR>(x + first * s.width, s.width, here, s.width, share, units, x_left, xs.get());
            pack_outer<LEFT>(dy + first * s.width, s.width, here, s.width, share, units, !hidden_left, dys.get());
            pack_outer<NR>(hidden + first * s.hidden, s.hidden, here, s.hidden, share, units, hidden_left, hiddens.get());
            row_blocks(tasks, here, [&](long row, long height) {
                const real* dy_here = dy + (first + row) * s.width;
                const real* by = (slope ? slope : hidden) + (first + row) * s.hidden;
                multiply_rows(dy_here, s.width, height, s.width, outs.get(), s.hidden, spare,
                              [&](long r, long c, auto n, vec v) {
                                  const vec at = load_part(by + r * s.hidden + c, n);
                                  store_part(dz + r * z_row + c, v * (slope ? at : Relu2::slope_of<real>(at)), n);
                              });
                pack_outer<LEFT>(dz, z_row, height, s.hidden, Share(0, depth_of(height)), units, !x_left,
                                 dzs.get() + units_of(row) * LEFT);
                multiply_rows(dz, z_row, height, s.hidden, ups.get(), s.width, spare,
                              into(dx + (first + row) * s.width, s.width));
            });
            const OuterProduct of_weights[] = {{dzs.get(), xs.get(), s.hidden, s.width, dup},
                                               {dys.get(), hiddens.get(), s.width, s.hidden, dout}};
            const OuterProducts<2> products{of_weights, units, SUMMED_ROWS, first == 0};
            tasks.each(products.count(), [&](long task) { products.of(task); });
        }
    }
}

}  // namespace

void layer_backward(const LinearLayer& s, const real* x, const float* weight, const RowsOf& dy_of, float* dweight,
                    real* dx, bool add, int threads) {
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
        pack<NR>(weight, s.inputs, s.outputs, s.inputs, depth_share(depth, thread, n), depth, down.get());
        for (long first = 0; first < s.rows; first += slice) {
            const long here = std::min(slice, s.rows - first), units = depth_of(here);
            const Share share = depth_share(units, thread, n);
            const Share rows(std::min(numbers_of(share.first), here), std::min(numbers_of(share.last), here));
            const real *x_here = x + first * s.stride, *dy_here = dy_of(first, rows.first, rows.last);
            pack_outer<NR>(x_here, s.stride, here, s.inputs, share, units, x_left, xs.get());
            pack_outer<LEFT>(dy_here, s.outputs, here, s.outputs, share, units, !x_left, dys.get());
#pragma omp barrier
            const OuterProduct of_weight[] = {{dys.get(), xs.get(), s.outputs, s.inputs, dweight}};
            const OuterProducts<1> products{of_weight, units, SUMMED_ROWS, first == 0};
            const RowBlocks<> blocks(here);
            tasks.each(blocks.count() + products.count(), [&](long task) {
                if (task >= blocks.count()) return products.of(task - blocks.count());
                blocks.of(task, [&](long row, long height) {
                    multiply_rows(dy_here + row * s.outputs, s.outputs, height, s.outputs, down.get(), s.inputs, spare,
                                  into(dx + (first + row) * s.stride, s.stride, add));
                });
            });
        }
    }
}

extern "C" {

// Whether the operating system lets this process use the registers that products take. To be called before them.
int products_are_permitted() { return registers_are_permitted(); }

void linear_forward(const real* x, const float* weight, real* y, long rows, long inputs, long outputs,
                    long threads) try {
    linear_forward(LinearLayer{rows, inputs, outputs, inputs}, x, weight, y, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

void linear_backward(const real* x, const float* weight, const real* dy, real* dx, float* dweight, long rows,
                     long inputs, long outputs, long threads) try {
    const auto dy_of = [=](long first, long, long) { return dy + first * outputs; };
    layer_backward({rows, inputs, outputs, inputs}, x, weight, dy_of, dweight, dx, false, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

// The activation is GELU or else ReLU^2.
void mlp_forward(const real* x, const float* up, const float* down, const real* residual, real* hidden, real* slope,
                 real* y, long rows, long width, long hidden_width, long gelu, long threads) try {
    const MLP s{rows, width, hidden_width};
    const auto forward = gelu ? mlp_forward<Gelu> : mlp_forward<Relu2>;
    forward(s, x, up, down, residual, hidden, slope, y, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

void mlp_backward(const real* x, const float* up, const float* down, const real* hidden, const real* slope,
                  const real* dy, real* dx, float* dup, float* ddown, long rows, long width, long hidden_width,
                  long threads) try {
    const MLP s{rows, width, hidden_width};
    mlp_backward(s, x, up, down, hidden, slope, dy, dx, dup, ddown, threads);
} catch (const std::bad_alloc&) { ran_out = true; }
}
