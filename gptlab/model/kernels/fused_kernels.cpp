// What a GPT computes between its matrix products, on a CPU: embeddings, norms with the sums before them, heads with
// rotation, gates and norms, activations and dropout; and the sum of squares of its gradients. Each is one pass over
// memory, forward and backward; as single operations of PyTorch they are three to ten.
//
// Activations are `real`; whatever is computed is float32, rounded when it is stored. A row is computed by one thread in a
// fixed order, and sums over rows in CHUNKS parts: the bits do not depend on the number of threads.

#include "activations.h"
#include "heads.h"
#include "parts.h"
#include "scratch.h"
#include "tasks.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr long CHUNKS = 64;

}  // namespace

extern "C" {

// mixed = a x + b y, or x where there is no y; normed = mixed / rms(mixed); inverse = 1 / rms, one a row.
void norm_forward(const real* x, const real* y, float a, float b, real* mixed, real* normed, float* inverse, long rows,
                  long width, float eps, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long row = 0; row < rows; row++) {
        const long at = row * width;
        const real* from = x + at;
        vec squares{};
        if (y) {
            vectors(width, [&](long i, auto n) {
                store_part(mixed + at + i, load_part(x + at + i, n) * a + load_part(y + at + i, n) * b, n);
                const vec v = load_part(mixed + at + i, n);  // as it was rounded
                squares += v * v;
            });
            from = mixed + at;
        } else {
            vectors(width, [&](long i, auto n) {
                const vec v = load_part(from + i, n);
                squares += v * v;
            });
        }
        const float factor = inverse[row] = 1 / std::sqrt(sum_of(squares) / width + eps);
        vectors(width, [&](long i, auto n) { store_part(normed + at + i, load_part(from + i, n) * factor, n); });
    }
}

// dx = a g and dy = b g + before, rounded as autograd adds them, for g = dmixed + the gradient through the norm. `sums` (2):
// those of g x and of g y. dmixed, y with dy, before, which may be dy, and sums may be null. dx may be null, too: then what
// it would be is added to dy last.
void norm_backward(const real* dmixed, const real* dnormed, const real* mixed, const float* inverse, const real* x,
                   const real* y, float a, float b, real* dx, real* dy, const real* before, double* sums, long rows,
                   long width, long threads) {
    double parts[CHUNKS][2];
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long chunk = 0; chunk < CHUNKS; chunk++) {
        double of_x = 0, of_y = 0;
        for (long row = rows * chunk / CHUNKS; row < rows * (chunk + 1) / CHUNKS; row++) {
            const long at = row * width;
            const float factor = inverse[row];
            const long ahead = at + 8 * width;  // see `prefetch`
            prefetch(mixed + ahead, width);
            if (sums) prefetch(x + ahead, width), prefetch(y + ahead, width);
            vec products{}, with_x{}, with_y{};
            vectors(width, [&](long i, auto n) {
                products += load_part(dnormed + at + i, n) * load_part(mixed + at + i, n);
            });
            const float along = sum_of(products) * factor * factor * factor / width;
            vectors(width, [&](long i, auto n) {
                vec g = load_part(dnormed + at + i, n) * factor - load_part(mixed + at + i, n) * along;
                if (dmixed) g += load_part(dmixed + at + i, n);
                if (sums) {
                    with_x += g * load_part(x + at + i, n);
                    with_y += g * load_part(y + at + i, n);
                }
                if (dx) store_part(dx + at + i, g * a, n);
                if (!dy) return;
                vec sum = g * b;
                if (before) sum = rounded<real>(sum) + load_part(before + at + i, n);
                store_part(dy + at + i, dx ? sum : rounded<real>(sum) + rounded<real>(g * a), n);
            });
            of_x += sum_of(with_x);
            of_y += sum_of(with_y);
        }
        parts[chunk][0] = of_x, parts[chunk][1] = of_y;
    }
    if (!sums) return;
    sums[0] = sums[1] = 0;
    for (const auto& part : parts) sums[0] += part[0], sums[1] += part[1];
}

// mixed = a x + b y, or x where there is no y; normed = (mixed - mean) / deviation * weight + bias; moments (rows, 2): the
// mean and 1 / deviation. bias may be null.
void layer_norm_forward(const real* x, const real* y, float a, float b, const float* weight, const float* bias,
                        real* mixed, real* normed, float* moments, long rows, long width, float eps, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long row = 0; row < rows; row++) {
        const real *first = x + row * width, *second = y ? y + row * width : nullptr;
        const real* from = y ? mixed + row * width : first;
        vec sums{}, squares{};
        vectors(width, [&](long i, auto n) {
            if (y) store_part(mixed + row * width + i, load_part(first + i, n) * a + load_part(second + i, n) * b, n);
            sums += load_part(from + i, n);  // as it was rounded
        });
        const float mean = sum_of(sums) / width;
        vectors(width, [&](long i, auto n) {
            const vec v = first_lanes(load_part(from + i, n) - mean, n, 0);
            squares += v * v;
        });
        const float factor = 1 / std::sqrt(sum_of(squares) / width + eps);
        moments[2 * row] = mean, moments[2 * row + 1] = factor;
        vectors(width, [&](long i, auto n) {
            const vec v = (load_part(from + i, n) - mean) * factor * load_part(weight + i, n);
            store_part(normed + row * width + i, bias ? v + load_part(bias + i, n) : v, n);
        });
    }
}

// dx = a g and dy = b g, for g = dmixed + the gradient through the norm; dweight and dbias (width). dmixed, dy, and dbias
// may be null.
void layer_norm_backward(const real* dmixed, const real* dnormed, const real* mixed, const float* moments,
                         const float* weight, float a, float b, real* dx, real* dy, float* dweight, float* dbias,
                         long rows, long width, long threads) try {
    std::vector<float> parts(CHUNKS * 2 * width);
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long chunk = 0; chunk < CHUNKS; chunk++) {
        float *of_weight = parts.data() + chunk * 2 * width, *of_bias = of_weight + width;
        for (long row = rows * chunk / CHUNKS; row < rows * (chunk + 1) / CHUNKS; row++) {
            const long at = row * width;
            const float mean = moments[2 * row], factor = moments[2 * row + 1];
            vec sums{}, products{};
            vectors(width, [&](long i, auto n) {
                const vec d = load_part(dnormed + at + i, n), g = d * load_part(weight + i, n);
                const vec standard = (load_part(mixed + at + i, n) - mean) * factor;
                sums += g;
                products += g * standard;
                store_part(of_weight + i, load_part(of_weight + i, n) + d * standard, n);
                if (dbias) store_part(of_bias + i, load_part(of_bias + i, n) + d, n);
            });
            const float shift = sum_of(sums) / width, along = sum_of(products) / width;
            vectors(width, [&](long i, auto n) {
                const vec standard = (load_part(mixed + at + i, n) - mean) * factor;
                vec g = (load_part(dnormed + at + i, n) * load_part(weight + i, n) - shift - standard * along) * factor;
                if (dmixed) g = rounded<float>(g) + load_part(dmixed + at + i, n);
                store_part(dx + at + i, g * a, n);
                if (dy) store_part(dy + at + i, g * b, n);
            });
        }
    }
    for (long i = 0; i < width; i++) {
        double of_weight = 0, of_bias = 0;
        for (long chunk = 0; chunk < CHUNKS; chunk++)
            of_weight += parts[chunk * 2 * width + i], of_bias += parts[(chunk * 2 + 1) * width + i];
        dweight[i] = of_weight;
        if (dbias) dbias[i] = of_bias;
    }
} catch (const std::bad_alloc&) { ran_out = true; }

}

namespace {

void heads_forward(const Heads& s, long rows, const real* heads, const real* gates, const real* extra, real* out,
                   float* inverse, int threads) {
    const int most = team(rows * s.token(), threads);
    const Rooms<float> all_turned(most, s.width);
#pragma omp parallel num_threads(most)
    {
        float* turned = all_turned.own();
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            s.prepare(row, heads + row * s.token(), gates ? gates + row * s.n_kv_head : nullptr, extra, out, inverse,
                      turned);
    }
}

void heads_backward(const Heads& s, long rows, const real* dout, const real* out, const float* inverse, const real* gates,
                    const real* extra, real* dheads, real* dgates, real* dextra, int threads) {
    const int most = team(rows * s.token(), threads);
    const Rooms<float> all_turned(most, s.width);
#pragma omp parallel num_threads(most)
    {
        float* turned = all_turned.own();
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            s.gradient(row, dout, out, inverse, gates, extra, dheads + row * s.token(), dgates, dextra, turned);
    }
}

// Elements in whole vectors, by threads.
template <class Body>
void elementwise(long count, int threads, Body body) {
    const long whole = (count + W - 1) / W;
#pragma omp parallel for schedule(static) num_threads(team(count, threads))
    for (long part = 0; part < whole; part++) {
        if (part * W + W <= count)
            body(part * W, std::integral_constant<long, W>());
        else
            body(part * W, count - part * W);
    }
}

}  // namespace

extern "C" {

void heads_forward(long rows, long tokens, long n_head, long n_kv_head, long width, const real* heads, const real* gates,
                   const real* extra, const float* cos, const float* sin, float eps, real* y, float* inverse,
                   long threads) try {
    const Heads s{tokens, n_head, n_kv_head, width, cos, sin, eps};
    heads_forward(s, rows, heads, gates, extra, y, inverse, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

void heads_backward(long rows, long tokens, long n_head, long n_kv_head, long width, const real* dy, const real* y,
                    const float* inverse, const real* gates, const real* extra, const float* cos, const float* sin,
                    real* dheads, real* dgates, real* dextra, long threads) try {
    const Heads s{tokens, n_head, n_kv_head, width, cos, sin, -1};
    heads_backward(s, rows, dy, y, inverse, gates, extra, dheads, dgates, dextra, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

// y = max(x, 0)^2
void relu2_forward(const real* x, real* y, long count, long threads) {
    elementwise(count, threads, [&](long i, auto n) {
        store_part(y + i, Relu2::of<real>(load_part(x + i, n)).value, n);
    });
}

void relu2_backward(const real* x, const real* dy, real* dx, long count, long threads) {
    elementwise(count, threads, [&](long i, auto n) {
        store_part(dx + i, load_part(dy + i, n) * Relu2::of<real>(load_part(x + i, n)).slope, n);
    });
}

// y = x P(X <= x), X normal; slope, unless null: the derivative.
void gelu(const real* x, real* y, real* slope, long count, long threads) {
    elementwise(count, threads, [&](long i, auto n) {
        const Activated at = Gelu::of<real>(load_part(x + i, n));
        store_part(y + i, at.value, n);
        if (slope) store_part(slope + i, at.slope, n);
    });
}

// y = cap tanh(x / cap)
void softcap_forward(const float* x, float* y, float cap, long count, long threads) {
    elementwise(count, threads, [&](long i, auto n) {
        store_part(y + i, softcapped<float>(load_part(x + i, n), cap), n);
    });
}

void softcap_backward(const float* x, const float* dy, float* dx, float cap, long count, long threads) {
    elementwise(count, threads, [&](long i, auto n) {
        const vec share = softcapped<float>(load_part(x + i, n), cap) * (1 / cap);
        store_part(dx + i, load_part(dy + i, n) * (1.0f - share * share), n);
    });
}

// y = x times the factors of dropout
void dropout(const real* x, real* y, long rows, long width, float rate, long seed, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long row = 0; row < rows; row++) {
        const Dropout dropout(rate, seed, row);
        const real* from = x + row * width;
        real* to = y + row * width;
        vectors(width, [&](long i, auto n) { store_part(to + i, load_part(from + i, n) * dropout.factors(i), n); });
    }
}

// y (rows, width) = the table's rows of these tokens
void look_up(const float* table, const int64_t* tokens, real* y, long rows, long width, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
    for (long row = 0; row < rows; row++) {
        const float* from = table + tokens[row] * width;
        vectors(width, [&](long i, auto n) { store_part(y + row * width + i, load_part(from + i, n), n); });
    }
}

// dtable (entries, width): for each entry the sum of its rows of dy, in their order. Each thread sums some columns, of
// whole cache lines, for all entries.
void look_up_backward(const real* dy, const int64_t* tokens, float* dtable, long rows, long width, long entries,
                      long threads) {
    constexpr long LINE = 16;
    const long lines = (width + LINE - 1) / LINE;
#pragma omp parallel num_threads(std::min<long>(lines, team(rows * width, threads)))
    {
        const Share share(lines, omp_get_thread_num(), omp_get_num_threads());
        const long first = share.first * LINE, columns = std::min(share.last * LINE, width) - first;
        for (long entry = 0; entry < entries; entry++)
            std::memset(dtable + entry * width + first, 0, columns * sizeof(float));
        for (long row = 0; row < rows; row++) {
            const real* from = dy + row * width + first;
            float* to = dtable + tokens[row] * width + first;
            vectors(columns, [&](long i, auto n) {
                store_part(to + i, load_part(to + i, n) + load_part(from + i, n), n);
            });
        }
    }
}

struct Array {
    const float* elements;
    int64_t size;
};

// total = the sum of the squares of all elements of some arrays, in float64. Parts of an array are summed each on its own.
void sum_of_squares(const Array* arrays, long count, double* total, long threads) try {
    typedef double wide_vec __attribute__((vector_size(W * sizeof(double))));
    constexpr long PART = SMALL;
    std::vector<Array> parts;
    for (long i = 0; i < count; i++)
        for (long at = 0; at < arrays[i].size; at += PART)
            parts.push_back({arrays[i].elements + at, std::min<long>(PART, arrays[i].size - at)});
    const long n_parts = parts.size();
    std::vector<double> sums(n_parts);
#pragma omp parallel for schedule(static) num_threads(team(n_parts * PART, threads))
    for (long i = 0; i < n_parts; i++) {
        const Array part = parts[i];
        wide_vec squares{};
        vectors(part.size, [&](long at, auto n) {
            __builtin_prefetch(part.elements + at + 512);  // without, 1.45 times as long (see `prefetch`)
            const wide_vec x = __builtin_convertvector(load_part(part.elements + at, n), wide_vec);
            squares += x * x;
        });
        for (int lane = 0; lane < W; lane++) sums[i] += squares[lane];
    }
    *total = 0;
    for (const double sum : sums) *total += sum;
} catch (const std::bad_alloc&) { ran_out = true; }
}
