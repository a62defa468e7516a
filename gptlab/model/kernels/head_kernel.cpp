// The output head of a GPT on a CPU: the loss of logits with its gradient, and the whole head with it; logits, and the
// loss of each token.
//
// The whole head computes some rows of logits, their loss, its gradient and that of the rows' inputs while the logits are
// in the cache; then, for a slice of rows, the gradient of the weights. docs/LOG.md, 2026-11-24, compares it with the
// library's products. Logits and sums are float32; what products take is `real`.
//
// A row is computed by one thread in a fixed order, and so is each element of the weights' gradient: the bits do not
// depend on the number of threads.

#include "layers.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

// A slice has so many logits, or so many rows: for each slice, all of the weights' gradient is read and written.
constexpr long SLICE_LOGITS = 1 << 22, LOGIT_ROWS = 256;

constexpr long HEAD_ROWS = BY_AMX ? 64 : HEIGHT;  // whose logits are in the cache at a time

// The loss in nats of a row of logits before the softcap, and its gradient with respect to them, which may begin where they
// do. Entries from `vocab` on are padding. A negative target does not count. cap = 0: none. room: for `vocab` numbers.
template <class L>
double loss_row(const L* logits, real* gradient, long target, long columns, long vocab, float cap, float* room) {
    if (target < 0) {
        std::fill_n(gradient, columns, real{});
        return 0;
    }
    vec top = all(-INFINITY), sums{};
    vectors(vocab, [&](long i, auto n) {
        const vec z = load_part(logits + i, n), c = cap > 0 ? softcapped<real>(z, cap) : z;
        store_part(room + i, c, n);
        const vec counted = first_lanes(c, n, -INFINITY);
        top = select(counted > top, counted, top);
    });
    const float of_target = room[target], highest = highest_of(top);
    const auto slope = [=, inverse = 1 / cap](vec c) {  // of the softcap
        const vec squashed = c * inverse;
        return cap > 0 ? 1.0f - squashed * squashed : all(1.0f);
    };
    vectors(vocab, [&](long i, auto n) {
        const vec c = load_part(room + i, n), weight = first_lanes(exponential_of<real>(c, 1, highest), n, 0);
        sums += weight;
        store_part(room + i, weight * slope(c), n);
    });
    const float total = sum_of(sums), inverse = 1 / total;
    room[target] -= total * slope(all(of_target))[0];  // the gradient without the softcap is softmax - onehot
    vectors(vocab, [&](long i, auto n) { store_part(gradient + i, load_part(room + i, n) * inverse, n); });
    std::fill(gradient + vocab, gradient + columns, real{});
    return (double)highest - of_target + std::log((double)total);
}

void loss_rows(real* z, const int64_t* targets, long rows, long columns, long vocab, float cap, double* nats, int threads) {
    const int most = team(rows * columns, threads);
    const Rooms<float> of_row(most, vocab);
#pragma omp parallel num_threads(most)
    {
        float* room = of_row.own();
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            real* here = z + row * columns;
            nats[row] = loss_row(here, here, targets[row], columns, vocab, cap, room);
        }
    }
}

struct Head {
    long rows, width, entries, vocab;
    float cap;
};

// targets and cap: as in loss_row; x, dx: (rows, width); weight, dweight: (entries, width). nats: the loss of each row.
void whole_head(const Head& s, const real* x, const float* weight, const int64_t* targets, real* dx, float* dweight,
                double* nats, int threads) {
    const long panels = panels_of(s.entries), inputs = panels_of(s.width);
    const long width = units_of(s.width), depth = units_of(s.entries);
    const long slice = round_up(std::min(s.rows, std::max(SLICE_LOGITS / s.entries, LOGIT_ROWS)), MR);
    const bool x_left = x_is_left(s.entries, s.width);
    const long z_row = panels * NR + NR;  // rows that are a power of two apart would share few places of the cache
    const auto up = room<unit>(panels * width * NR);                           // the transposed weights
    const auto down = room<unit>(inputs * depth * NR);                         // the weights
    const auto xs = room<unit>(inputs * units_of(slice) * NR);                 // a slice of x
    const auto dzs = room<unit>(round_up(s.entries, LEFT) * units_of(slice));  // the gradients of its logits
    const int most = team(s.rows * s.entries, threads);
    const Rooms<float> all_logits(most, HEAD_ROWS * z_row), of_rows(most, s.entries);
    const Rooms<unit> all_rows(most, HEAD_ROWS * std::max(width, depth));
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        const Registers registers{};
        float *logits = all_logits.own(), *of_row = of_rows.own();
        unit* rows = all_rows.own();
        real* dz = reinterpret_cast<real*>(logits);  // the gradient of logits takes their place
        const long dz_row = z_row * sizeof(float) / sizeof(real), dz_columns = round_up(s.entries, PER_UNIT);
        pack_transposed(weight, s.entries, s.width, Share(panels, thread, n_threads), up.get());
        pack<NR>(weight, s.width, s.entries, s.width, depth_share(depth, thread, n_threads), depth, down.get());
#pragma omp barrier
        for (long first = 0; first < s.rows; first += slice) {
            const long here = std::min(slice, s.rows - first), units = depth_of(here);
            pack_outer<NR>(x + first * s.width, s.width, here, s.width, depth_share(units, thread, n_threads), units,
                           x_left, xs.get());
            row_blocks<HEAD_ROWS>(tasks, here, [&](long row, long height) {
                const long n = tiles_of(height), r0 = first + row;
                pack_rows(x + r0 * s.width, s.width, height, s.width, n, rows);
                multiply_panels(n, width, rows, width, up.get(), width, panels * NR, are_far(width, panels * NR), false,
                                logits, z_row);
                for (long r = 0; r < height; r++)
                    nats[r0 + r] = loss_row(logits + r * z_row, dz + r * dz_row, targets[r0 + r], dz_columns,
                                            s.vocab, s.cap, of_row);
                pack_outer<LEFT>(dz, dz_row, height, s.entries, Share(0, depth_of(height)), units, !x_left,
                                 dzs.get() + units_of(row) * LEFT);
                multiply_rows(dz, dz_row, height, s.entries, down.get(), s.width, rows, into(dx + r0 * s.width, s.width));
            });
            const OuterProduct of_weight[] = {{dzs.get(), xs.get(), s.entries, s.width, dweight}};
            const OuterProducts<1> products{of_weight, units, units, first == 0};
            tasks.each(products.count(), [&](long task) { products.of(task); });
        }
    }
}

// z (rows, vocab): the logits after the softcap. Its rows are often a power of two apart, so that few of them have a place
// in the first cache: where panels are of pairs, which are half as large, fewer rows share one. It saves 2 to 7% of
// quickstart's validation (docs/LOG.md, 2026-11-25).
void capped_logits(const Head& s, const real* x, const float* weight, float* z, int threads) {
    constexpr long AT_ONCE = (PAIRS ? HEAD_ROWS / 2 : HEAD_ROWS) / MR;
    const long width = units_of(s.width), panels = panels_of(s.vocab);
    const auto up = room<unit>(panels * width * NR);  // the transposed weights
    const int most = team(s.rows * s.vocab, threads);
    const Rooms<unit> all_rows(most, HEAD_ROWS * width);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        const Registers registers{};
        unit* rows = all_rows.own();
        pack_transposed(weight, s.vocab, s.width, Share(panels, thread, n_threads), up.get());
#pragma omp barrier
        const Share tiles(tiles_of(s.rows), thread, n_threads);
        for (long from = tiles.first; from < tiles.last; from += AT_ONCE) {
            const long n = std::min(AT_ONCE, tiles.last - from), r0 = from * MR;
            const long height = std::min(n * MR, s.rows - r0);
            pack_rows(x + r0 * s.width, s.width, height, s.width, n, rows);
            multiply(height, width, rows, width, up.get(), s.vocab, [&](long r, long c, auto n, vec v) {
                store_part(z + (r0 + r) * s.vocab + c, s.cap > 0 ? softcapped<real>(v, s.cap) : v, n);
            });
        }
    }
}

// The loss in nats of a row of `vocab` logits after the softcap, 0 where the target is negative. at(i, n): n of them from i
// on, which are at z + i from then on.
template <class At>
float loss_after_softcap(long target, long vocab, const float* z, At at) {
    vec top = all(-INFINITY), sums{};
    vectors(vocab, [&](long i, auto n) {
        const vec v = first_lanes(at(i, n), n, -INFINITY);
        top = select(v > top, v, top);
    });
    const float highest = highest_of(top);
    vectors(vocab, [&](long i, auto n) { sums += first_lanes(exponential(load_part(z + i, n) - highest), n, 0); });
    return target < 0 ? 0 : (double)highest - z[target] + std::log((double)sum_of(sums));
}

void head_nats(const Head& s, const real* x, const float* weight, const int64_t* targets, float* nats, int threads) {
    const long width = units_of(s.width), panels = panels_of(s.vocab), z_row = panels * NR + NR;
    const auto up = room<unit>(panels * width * NR);  // the transposed weights
    const int most = team(s.rows * s.vocab, threads);
    const Rooms<unit> all_rows(most, HEAD_ROWS * width);
    const Rooms<float> all_logits(most, HEAD_ROWS * z_row);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        const Registers registers{};
        unit* rows = all_rows.own();
        float* logits = all_logits.own();
        pack_transposed(weight, s.vocab, s.width, Share(panels, thread, n_threads), up.get());
#pragma omp barrier
        row_blocks<HEAD_ROWS>(tasks, s.rows, [&](long r0, long height) {
            const long n = tiles_of(height);
            pack_rows(x + r0 * s.width, s.width, height, s.width, n, rows);
            multiply_panels(n, width, rows, width, up.get(), width, panels * NR, are_far(width, panels * NR), false,
                            logits, z_row);
            for (long r = 0; r < height; r++) {
                float* z = logits + r * z_row;
                nats[r0 + r] = loss_after_softcap(targets[r0 + r], s.vocab, z, [=, cap = s.cap](long i, auto n) {
                    const vec v = load_part(z + i, n), c = cap > 0 ? softcapped<real>(v, cap) : v;
                    store_part(z + i, c, n);
                    return c;
                });
            }
        });
    }
}

double sum_of(const std::vector<double>& nats) {
    double sum = 0;
    for (double one : nats) sum += one;
    return sum;
}

}  // namespace

extern "C" {

// `sum`: the losses of all rows; z becomes the gradient of it.
void loss_and_gradient(real* z, const int64_t* targets, long rows, long columns, long vocab, float cap, double* sum,
                       long threads) try {
    std::vector<double> nats(rows);
    loss_rows(z, targets, rows, columns, vocab, cap, nats.data(), threads);
    *sum = sum_of(nats);
} catch (const std::bad_alloc&) { ran_out = true; }

// The same for logits x weight^T: the gradients with respect to x, in its type, and to weight.
void head_loss(const real* x, const float* weight, const int64_t* targets, real* dx, float* dweight, double* sum,
               long rows, long width, long entries, long vocab, float cap, long threads) try {
    std::vector<double> nats(rows);
    const Head s{rows, width, entries, vocab, cap};
    whole_head(s, x, weight, targets, dx, dweight, nats.data(), threads);
    *sum = sum_of(nats);
} catch (const std::bad_alloc&) { ran_out = true; }

// z (rows, vocab) = the softcap of x weight^T; cap = 0: none.
void capped_logits(const real* x, const float* weight, float* z, long rows, long width, long vocab, float cap,
                   long threads) try {
    const Head s{rows, width, vocab, vocab, cap};
    capped_logits(s, x, weight, z, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

// nats: the loss of each row of logits (rows, vocab) after the softcap, 0 where its target is negative.
void losses(const float* logits, const int64_t* targets, float* nats, long rows, long vocab, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * vocab, threads))
    for (long row = 0; row < rows; row++) {
        const float* z = logits + row * vocab;
        nats[row] = loss_after_softcap(targets[row], vocab, z, [=](long i, auto n) { return load_part(z + i, n); });
    }
}

// The same of the logits that capped_logits makes, to the bit: a few rows of them, while they are in the cache.
void head_nats(const real* x, const float* weight, const int64_t* targets, float* nats, long rows, long width,
               long vocab, float cap, long threads) try {
    head_nats(Head{rows, width, vocab, vocab, cap}, x, weight, targets, nats, threads);
} catch (const std::bad_alloc&) { ran_out = true; }
}
