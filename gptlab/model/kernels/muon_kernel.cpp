// Muon's update on a CPU: the running means of gradients, the orthogonalization of matrices, NorMuon, and the step of the
// weights. optim/muon.py and optim/orthogonalize.py say what they are; weights and state are float32.
//
// A matrix is orthogonalized by one thread, so that it stays in its core's cache. Products have operands in `real`, sums
// in float32.

#include "layers.h"

#include <algorithm>
#include <cmath>

namespace {

struct Polynomial {
    float a, b, c;
};

// x (n, k) with n <= k, by rows, and what the iteration takes beside it. Rows and columns after those are zeros.
struct Work {
    long tall, wide;  // n and k, rounded up to whole tiles and units
    real *x, *gram, *polynomial;
    unit *panels, *spare;

    static long elements(long tall, long wide) { return tall * wide + 2 * tall * tall; }

    static long units(long tall, long wide) {
        return std::max({round_up(tall, NR) * units_of(wide), round_up(tall, NR) * units_of(tall),
                         round_up(wide, NR) * units_of(tall)});
    }
};

// to (n, columns) = before, of that shape, times `of_before`, plus rows (n, depth) times panels, times `of_product`; all
// are real.
void add_product(const Work& work, const real* rows, long depth, long columns, const real* before, float of_before,
                 float of_product, real* to) {
    multiply_rows(rows, depth, work.tall, depth, work.panels, columns, work.spare, [=](long r, long c, auto count, vec v) {
        const long at = r * columns + c;
        store_part(to + at, before ? load_part(before + at, count) * of_before + v * of_product : v, count);
    });
}

// x <- a x + (b A + c A A) x with A = x x^T.
void iterate(const Work& work, Polynomial by) {
    const auto [n, k, x, gram, polynomial, panels, spare] = work;
    const Share all_units(0, units_of(n));
    pack_transposed(x, n, k, Share(0, panels_of(n)), panels);
    add_product(work, x, k, n, nullptr, 0, 1, gram);
    pack<NR>(gram, n, n, n, all_units, units_of(n), panels);
    add_product(work, gram, n, n, gram, by.b, by.c, polynomial);
    pack<NR>(x, k, n, k, all_units, units_of(n), panels);
    add_product(work, polynomial, n, k, x, by.a, 1, x);
}

// to (columns, rows) = the transposed of from (rows, columns), times a factor.
template <class From, class To>
void transpose(const From* from, long stride, long rows, long columns, float factor, To* to, long to_stride) {
    for (long r = 0; r < rows; r += W)
        for (long c = 0; c < columns; c += W) {
            const long tall = std::min<long>(W, rows - r), wide = std::min<long>(W, columns - c);
            vec square[W];
            for (long i = 0; i < W; i++)
                square[i] = i < tall ? load_part(from + (r + i) * stride + c, wide) * factor : vec{};
            transpose_vectors(square);
            for (long i = 0; i < wide; i++) store_part(to + (c + i) * to_stride + r, square[i], tall);
        }
}

// of(i, first, n) for parts of some arrays: n elements of the ith, from `first` on. Array: a struct with their `size`.
template <class Array, class Of>
void each_part(const Array* arrays, long count, long threads, Of of) {
    long all = 0;
    for (long i = 0; i < count; i++) all += arrays[i].size;
#pragma omp parallel num_threads(team(all, threads))
    {
        const Share share(all, omp_get_thread_num(), omp_get_num_threads());
        long before = 0;  // elements of the arrays before this one
        for (long i = 0; i < count; before += arrays[i++].size) {
            const long first = std::clamp(share.first - before, 0L, arrays[i].size);
            of(i, first, std::clamp(share.last - before, 0L, arrays[i].size) - first);
        }
    }
}

struct Moved {
    float* mean;
    const float* gradient;
    float* direction;
    int64_t size;
};

struct Stepped {
    float* weight;
    const float* update;
    int64_t size;
};

}  // namespace

extern "C" {

// mean += share (gradient - mean); direction = that mean, or with Nesterov the gradient + (1 - share) (mean - gradient).
void muon_directions(const Moved* arrays, long count, float share, long nesterov, long threads) {
    each_part(arrays, count, threads, [=](long i, long first, long n) {
        float *mean = arrays[i].mean + first, *direction = arrays[i].direction + first;
        const float* gradient = arrays[i].gradient + first;
        vectors(n, [&](long at, auto m) {
            const vec g = load_part(gradient + at, m), old = load_part(mean + at, m);
            const vec now = old + (g - old) * share;
            store_part(mean + at, now, m);
            store_part(direction + at, nesterov ? now + (g - now) * share : now, m);
        });
    });
}

// weight -= lr (update + decay weight); where `cautious`, with decay only where update and weight have one sign.
void muon_step(const Stepped* arrays, long count, float lr, float decay, long cautious, long threads) {
    each_part(arrays, count, threads, [=](long i, long first, long n) {
        float* weight = arrays[i].weight + first;
        const float* update = arrays[i].update + first;
        vectors(n, [&](long at, auto m) {
            const vec w = load_part(weight + at, m), u = load_part(update + at, m);
            const vec decayed = cautious ? select(u * w >= 0.0f, w, vec{}) : w;
            store_part(weight + at, w - (u + decayed * decay) * lr, m);
        });
    });
}

// updates (count, rows, columns) times `scale` and, by NorMuon, the factor of each row, or of each column where there are
// more columns; moments (count, neurons): running means of the squares of rows or columns, as they are before.
void normuon(float* updates, float* moments, long count, long rows, long columns, float beta2, float scale,
             long threads) try {
    const bool by_row = rows >= columns;
    const long neurons = std::max(rows, columns);
    const int most = std::min<long>(count, team(count * rows * columns, threads));
    const Rooms<float> rooms(most, neurons);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    tasks.each(count, [&](long i) {
        float *update = updates + i * rows * columns, *moment = moments + i * neurons, *factors = rooms.own();
        std::fill_n(factors, neurons, 0);
        for (long r = 0; r < rows; r++) {
            vec sums{};
            vectors(columns, [&](long c, auto m) {
                const vec v = load_part(update + r * columns + c, m);
                sums += v * v;
                if (!by_row) store_part(factors + c, load_part(factors + c, m) + v * v, m);
            });
            if (by_row) factors[r] = sum_of(sums);
        }
        double before = 0, after = 0;
        for (long j = 0; j < neurons; j++) {
            const float square = factors[j] / std::min(rows, columns);
            moment[j] += (1 - beta2) * (square - moment[j]);
            factors[j] = 1 / std::sqrt(std::max(moment[j], 1e-10f));
            before += square, after += square * factors[j] * factors[j];
        }
        const float of_all = scale * std::sqrt(before) / std::max(std::sqrt(after), 1e-10);
        for (long r = 0; r < rows; r++)
            vectors(columns, [&](long c, auto m) {
                const vec by = by_row ? all(factors[r]) : load_part(factors + c, m);
                store_part(update + r * columns + c, load_part(update + r * columns + c, m) * by * of_all, m);
            });
    });
} catch (const std::bad_alloc&) { ran_out = true; }

// out = the matrices (count, rows, columns), each divided by its Frobenius norm times `factor` plus `addend`, and put
// through some polynomials.
void orthogonalize(const float* matrices, float* out, long count, long rows, long columns,
                   const Polynomial* polynomials, long iterations, float factor, float addend, long threads) try {
    const bool is_tall = rows > columns;
    const long n = round_up(std::min(rows, columns), MR), k = round_up(std::max(rows, columns), PER_UNIT);
    const int most = std::min<long>(count, team(count * rows * columns, threads));
    const Rooms<real> elements(most, Work::elements(n, k));
    const Rooms<unit> units(most, Work::units(n, k)), spares(most, TERMS > 1 ? n * units_of(k) : 0);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const Registers registers{};
        real* own = elements.own();
        const Work work{n, k, own, own + n * k, own + n * k + n * n, units.own(), spares.own()};
        tasks.each(count, [&](long i) {
            if (n * k > rows * columns) std::fill_n(work.x, n * k, real());
            const float* matrix = matrices + i * rows * columns;
            float* to = out + i * rows * columns;
            double squares = 0;
            for (long r = 0; r < rows; r++) {
                vec sums{};
                vectors(columns, [&](long c, auto m) {
                    const vec v = load_part(matrix + r * columns + c, m);
                    sums += v * v;
                });
                squares += sum_of(sums);
            }
            const float inverse = 1 / ((float)std::sqrt(squares) * factor + addend);
            if (is_tall)
                transpose(matrix, columns, rows, columns, inverse, work.x, k);
            else
                for (long r = 0; r < rows; r++)
                    vectors(columns, [&](long c, auto m) {
                        store_part(work.x + r * k + c, load_part(matrix + r * columns + c, m) * inverse, m);
                    });
            for (long step = 0; step < iterations; step++) iterate(work, polynomials[step]);
            if (is_tall)
                transpose(work.x, k, columns, rows, 1, to, columns);
            else
                for (long r = 0; r < rows; r++)
                    vectors(columns, [&](long c, auto m) {
                        store_part(to + r * columns + c, load_part(work.x + r * k + c, m), m);
                    });
        });
    }
} catch (const std::bad_alloc&) { ran_out = true; }
}
