// The output head of a GPT on a CPU: the loss of logits with its gradient, and, in float32, the whole head with it.
//
// The whole head computes some rows of logits, their loss, its gradient and that of the rows' inputs while the logits are
// in the cache; then, for a slice of rows, the gradient of the weights. docs/LOG.md, 2026-11-24, compares it with the
// library's products.
//
// A row is computed by one thread in a fixed order, and so is each element of the weights' gradient: the bits do not
// depend on the number of threads.

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

namespace {

// Rows and vectors of a tile.
#if defined(__AVX512F__)
constexpr int MR = 12, NV = 2;
#elif defined(__AVX__)
constexpr int MR = 6, NV = 2;
#else
constexpr int MR = 4, NV = 4;
#endif
constexpr int NR = W * NV;
constexpr long DEPTH = 4096 / NR;  // rows of a panel of NR columns: 16 KiB, which stay in the fastest cache
constexpr long TILES = 96 / MR;    // tiles of rows that share a panel while it is there
// A slice has so many logits, 8 MiB, or so many rows: for each slice, all of the weights' gradient is read and written.
constexpr long SLICE_LOGITS = 1 << 21, SLICE_ROWS = 256;

// A row of logits before the softcap becomes the gradient of its loss with respect to them; returns the loss in nats.
// Entries from `vocab` on are padding. A negative target does not count. cap = 0: none. capped, weights: room for whole
// vectors of a row.
template <class T>
double loss_row(T* logits, long target, long columns, long vocab, float cap, float* capped, float* weights) {
    if (target < 0) {
        std::fill(logits, logits + columns, T{});
        return 0;
    }
    const long whole = round_up(columns, W);
    vectors(columns, [&](long i, auto n) {
        const vec c = load_part(logits + i, n);
        store_part(capped + i, cap > 0 ? softcapped(c, cap) : c, n);
    });
    std::fill(capped + vocab, capped + whole, -INFINITY);
    vec top = all(-INFINITY);
    for (long i = 0; i < whole; i += W) {
        const vec c = load(capped + i);
        top = select(c > top, c, top);
    }
    const float highest = folded(top, [](vec a, vec b) { return select(b > a, b, a); });
    vec sums{};
    for (long i = 0; i < whole; i += W) {
        const vec w = exponential(load(capped + i) - highest);
        store(weights + i, w);
        sums += w;
    }
    const float total = sum_of(sums), inverse = 1 / total;
    const double nats = (double)highest - capped[target] + std::log((double)total);
    weights[target] -= total;  // the gradient without the softcap is softmax - onehot
    vectors(columns, [&](long i, auto n) {
        vec g = load(weights + i) * inverse;
        if (cap > 0) {
            const vec c = load(capped + i), squashed = c * (1 / cap);
            g = select(c == all(-INFINITY), vec{}, g * (1.0f - squashed * squashed));
        }
        store_part(logits + i, g, n);
    });
    return nats;
}

template <class T>
void loss_rows(T* z, const int64_t* targets, long rows, long columns, long vocab, float cap, double* nats, int threads) {
#pragma omp parallel num_threads(team(rows * columns, threads))
    {
        std::vector<float> capped(round_up(columns, W)), weights(capped.size());
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            nats[row] = loss_row(z + row * columns, targets[row], columns, vocab, cap, capped.data(), weights.data());
    }
}

struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};

typedef std::unique_ptr<float[], Free> Memory;

// Beginning with a line of the cache.
Memory room(long floats) {
    return Memory(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
}

Memory zeros(long floats) {
    Memory memory = room(floats);
    std::fill_n(memory.get(), floats, 0.0f);
    return memory;
}

// c (tiles * MR rows, NR columns) = the same rows of a (a_row apart, `depth` long) times a panel (depth, NR).
void multiply(long tiles, long depth, const float* a, long a_row, const float* panel, float* c, long c_row) {
    for (long k = 0; k < depth; k += DEPTH) {
        const long n = std::min(DEPTH, depth - k);
        for (long i = 0; i < tiles; i++) {
            const float* rows = a + i * MR * a_row + k;
            float* to = c + i * MR * c_row;
            if (k == 0)
                tile<MR, NV, false>(n, rows, a_row, 1, panel, NR, to, c_row);
            else
                tile<MR, NV, true>(n, rows, a_row, 1, panel + k * NR, NR, to, c_row);
        }
    }
}

struct Head {
    long rows, width, entries, vocab;
    float cap;
};

// targets and cap: as in loss_row; x, dx: (rows, width); weight, dweight: (entries, width). nats: the loss of each row,
// with room for MR - 1 more.
void whole_head(const Head& s, const float* x, const float* weight, const int64_t* targets, float* dx, float* dweight,
                double* nats, int threads) {
    // Whole tiles and panels: the zeros in them change no sum.
    const long padded = round_up(s.entries, NR), columns = round_up(s.width, NR), heights = round_up(s.width, MR);
    const long slice = round_up(std::min(s.rows, std::max(SLICE_LOGITS / padded, SLICE_ROWS)), MR);
    const long z_row = padded + NR;  // rows that are a power of two apart would share few places of the cache
    const auto up = zeros(padded * s.width);     // the transposed weights: (padded / NR, width, NR)
    const auto down = zeros(columns * padded);   // the weights: (columns / NR, padded, NR)
    const auto rows = room(slice * s.width);     // of x
    const auto turned = zeros(slice * heights);  // the same, transposed: (heights / MR, slice, MR)
    const auto z = room(slice * z_row);          // their logits, then the gradient with respect to those
    const auto sums = zeros(padded * heights);   // the weights' gradient, transposed: (padded / NR, heights, NR)
#pragma omp parallel num_threads(team(s.rows * s.entries, threads))
    {
        const long thread = omp_get_thread_num(), n_threads = omp_get_num_threads();
        const long p0 = padded / NR * thread / n_threads * NR, p1 = padded / NR * (thread + 1) / n_threads * NR;
        const auto capped = room(padded), weights = room(padded), panel = room(DEPTH * NR);
        const auto inputs = room(TILES * MR * columns);  // the gradient of TILES tiles of rows
        for (long p = p0; p < std::min(p1, s.entries); p++)
            for (long c = 0; c < s.width; c++) {
                const float one = weight[p * s.width + c];
                up[p / NR * NR * s.width + c * NR + p % NR] = one;
                down[(c / NR * padded + p) * NR + c % NR] = one;
            }
#pragma omp barrier
        for (long first = 0; first < s.rows; first += slice) {
            const long here = std::min(slice, s.rows - first), tiles = (here + MR - 1) / MR;
            const long end = tiles * (thread + 1) / n_threads;
            for (long from = tiles * thread / n_threads; from < end; from += TILES) {
                const long n = std::min(TILES, end - from), r0 = from * MR, r1 = r0 + n * MR;
                for (long r = r0; r < r1; r++) {
                    float* row = rows.get() + r * s.width;
                    if (r < here)
                        std::copy_n(x + (first + r) * s.width, s.width, row);
                    else
                        std::fill_n(row, s.width, 0.0f);
                    for (long c = 0; c < s.width; c += MR)
                        for (long i = 0; i < std::min<long>(MR, s.width - c); i++)
                            turned[c * slice + r * MR + i] = row[c + i];
                }
                for (long p = 0; p < padded; p += NR)
                    multiply(n, s.width, rows.get() + r0 * s.width, s.width, up.get() + p * s.width,
                             z.get() + r0 * z_row + p, z_row);
                for (long r = r0; r < r1; r++) {
                    float* logits = z.get() + r * z_row;
                    const long target = r < here ? targets[first + r] : -1;
                    nats[first + r] = loss_row(logits, target, s.entries, s.vocab, s.cap, capped.get(), weights.get());
                }
                for (long c = 0; c < columns; c += NR)
                    multiply(n, padded, z.get() + r0 * z_row, z_row, down.get() + c * padded, inputs.get() + c, columns);
                for (long r = r0; r < std::min(r1, here); r++)
                    std::copy_n(inputs.get() + (r - r0) * columns, s.width, dx + (first + r) * s.width);
            }
#pragma omp barrier
            for (long p = p0; p < p1; p += NR)
                for (long r0 = 0; r0 < tiles * MR; r0 += DEPTH) {
                    const long n = std::min(DEPTH, tiles * MR - r0);
                    for (long r = 0; r < n; r++)
                        for (long j = 0; j < NR; j += W)
                            store(panel.get() + r * NR + j, load(z.get() + (r0 + r) * z_row + p + j));
                    for (long c = 0; c < heights; c += MR)
                        tile<MR, NV, true>(n, turned.get() + c * slice + r0 * MR, 1, MR, panel.get(), NR,
                                           sums.get() + p * heights + c * NR, NR);
                }
#pragma omp barrier
        }
        for (long p = p0; p < std::min(p1, s.entries); p++)
            for (long c = 0; c < s.width; c++)
                dweight[p * s.width + c] = sums[p / NR * NR * heights + c * NR + p % NR];
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
void loss_and_gradient(long narrow, void* z, const int64_t* targets, long rows, long columns, long vocab, float cap,
                       double* sum, long threads) {
    std::vector<double> nats(rows);
    BY_TYPE(narrow, loss_rows(out<T>(z), targets, rows, columns, vocab, cap, nats.data(), threads))
    *sum = sum_of(nats);
}

// The same for logits x weight^T, in float32: the gradients with respect to x and weight.
void head_loss(long, const float* x, const float* weight, const int64_t* targets, float* dx, float* dweight, double* sum,
               long rows, long width, long entries, long vocab, float cap, long threads) {
    std::vector<double> nats(rows + MR);
    whole_head({rows, width, entries, vocab, cap}, x, weight, targets, dx, dweight, nats.data(), threads);
    *sum = sum_of(nats);
}
}
