// Causal attention on a CPU, forward and backward, in one pass over blocks that stay in the cache.
//
// Heads are float32 or bfloat16; scores, weights and sums are float32.
//
// Scores of 64 queries against 64 keys exist at one time (online softmax, as in FlashAttention, arXiv:2205.14135; the
// backward pass recomputes them from the log-sum-exp, arXiv:2307.08691). What causality hides is skipped, down to tiles
// of the diagonal blocks. docs/LOG.md, 2026-11-20, compares it with batched products and a fused softmax.
//
// heads   (batch, tokens, n_head + 2 n_kv_head, width): queries, keys, values of each token, contiguous
// y       (batch, tokens, n_head, width)
// lse     (batch, n_head, tokens): log of the sum of the exponentials of a query's scaled scores
//
// Dropout zeroes weights after the softmax. A hash of the seed, the query's place in the batch and the key decides which,
// so that the backward pass zeroes the same ones.
//
// A task is one key-value head of one sequence with all of its queries, computed by one thread in a fixed order. So the
// bits depend neither on the number of threads nor, without dropout, on the rest of the batch.

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace {

// Rows and vectors of a tile.
#if defined(__AVX512F__)
constexpr int MR = 8, NV = 2;
#elif defined(__AVX__)
constexpr int MR = 4, NV = 2;
#else
constexpr int MR = 4, NV = 4;
#endif
constexpr int NR = W * NV;
constexpr long BLOCK = 64;
static_assert(BLOCK % NR == 0 && BLOCK % MR == 0 && std::max(W, MR) % std::min(W, MR) == 0, "blocks are whole tiles");

// C += the sum over k in [from, to).
inline void add(long from, long to, const float* a, long a_row, long a_column, const float* b, long b_row, float* c,
                long c_row) {
    tile<MR, NV, true>(to - from, a + from * a_column, a_row, a_column, b + from * b_row, b_row, c, c_row);
}

struct Shape {
    long batch, tokens, n_head, n_kv_head, width, window;
    float dropout;  // the share of weights that become 0
    uint64_t seed;
    long rows() const { return round_up(tokens, BLOCK); }       // of a packed head: whole blocks, zeros at the end
    long columns() const { return round_up(width, NR); }        // likewise
    long packed() const { return rows() * columns(); }          // floats
    long token() const { return (n_head + 2 * n_kv_head) * width; }
    long group() const { return n_head / n_kv_head; }
    float scale() const { return 1 / std::sqrt((float)width); }
    // Floats of memory that each thread needs.
    long scratch() const { return 8 * packed() + 2 * rows() + 2 * BLOCK * BLOCK; }
    // Whether a query of the block at q0 may not see some key of the block at k0.
    bool hides(long q0, long k0) const { return k0 == q0 || k0 + window < q0 + BLOCK; }
};

// Prefetch a share of the next sequence's memory: rows of a single head are too far apart for the processor's own
// prefetcher.
template <class T>
void prefetch(const T* memory, long elements, long share, long shares) {
    const long end = elements * (share + 1) / shares, line = 64 / sizeof(T);
    for (long i = elements * share / shares; i < end; i += line) __builtin_prefetch(memory + i, 0, 2);
}

// Rows of `width` elements, `stride` apart, times `scale` -> packed.
template <class T>
void pack(const Shape& s, const T* from, long stride, float scale, float* to) {
    const long columns = s.columns();
    for (long t = 0; t < s.tokens; t++)
        for (long d = 0; d < columns; d += W)
            store(to + t * columns + d, load_part(from + t * stride + d, std::max(0L, s.width - d)) * scale);
    std::fill(to + s.tokens * columns, to + s.packed(), 0.0f);
}

// The same, each block of BLOCK rows as (columns, BLOCK).
template <class T>
void pack_transposed(const Shape& s, const T* from, long stride, float* to) {
    const long columns = s.columns();
    for (long t = 0; t < s.rows(); t += W)
        for (long d = 0; d < columns; d += W) {
            vec square[W];
            for (long i = 0; i < W; i++) {
                const long n = t + i < s.tokens ? std::max(0L, s.width - d) : 0;
                square[i] = load_part(from + (t + i) * stride + d, n);
            }
            transpose_vectors(square);
            float* corner = to + (t / BLOCK * columns + d) * BLOCK + t % BLOCK;
            for (long i = 0; i < W; i++) store(corner + i * BLOCK, square[i]);
        }
}

template <class T>
void unpack(const Shape& s, const float* packed, float scale, T* to, long stride) {
    for (long t = 0; t < s.tokens; t++)
        for (long d = 0; d < s.width; d += W)
            store_part(to + t * stride + d, load(packed + t * s.columns() + d) * scale, s.width - d);
}

// out (BLOCK, BLOCK) = rows of `left` from q0 on times the block of `transposed` at k0. Tiles that no query sees are 0.
void products(const Shape& s, const float* left, const float* transposed, long q0, long k0, float* out) {
    const long columns = s.columns();
    for (long r = 0; r < BLOCK; r += MR)
        for (long c = 0; c < BLOCK; c += NR)
            if (k0 + c < q0 + r + MR)
                tile<MR, NV, false>(columns, left + (q0 + r) * columns, columns, 1, transposed + k0 * columns + c,
                                    BLOCK, out + r * BLOCK + c, BLOCK);
            else
                for (long i = r; i < r + MR; i++) std::memset(out + i * BLOCK + c, 0, NR * sizeof(float));
}

void hide(const Shape& s, long q0, long k0, float* scores) {
    for (long r = 0; r < BLOCK; r++) {
        float* row = scores + r * BLOCK;
        const long after = q0 + r + 1 - k0;  // the first key after the query
        std::fill(row, row + std::clamp(after - s.window, 0L, BLOCK), -INFINITY);
        std::fill(row + std::clamp(after, 0L, BLOCK), row + BLOCK, -INFINITY);
    }
}

// Keys of a block that its query r needs: on the diagonal none after its own vector, or tile.
long keys_needed(long r, bool diagonal) { return diagonal ? round_up(r + 1, std::max(W, MR)) : BLOCK; }

// Adds a block of scores for each query: updates `highest` and `total`, turns the scores into weights relative to the
// new highest, and rescales `out` so far.
void online_softmax(const Shape& s, bool diagonal, float* scores, float* highest, float* total, float* out) {
    for (long r = 0; r < BLOCK; r++) {
        float* row = scores + r * BLOCK;
        const long keys = keys_needed(r, diagonal);
        vec top = load(row);
        for (long c = W; c < keys; c += W) {
            const vec z = load(row + c);
            top = select(z > top, z, top);
        }
        const float now = std::max(highest[r], folded(top, [](vec a, vec b) { return select(b > a, b, a); }));
        const float shift = now == -INFINITY ? 0 : now;  // a row of which the window hides all keys so far
        const float factor = total[r] == 0 ? 0 : std::exp(highest[r] - shift);
        vec sums = vec{};
        for (long c = 0; c < keys; c += W) {
            const vec weights = exponential(load(row + c) - shift);
            store(row + c, weights);
            sums += weights;
        }
        total[r] = total[r] * factor + sum_of(sums);
        highest[r] = now;
        float* so_far = out + r * s.columns();
        for (long d = 0; d < s.columns(); d += W) store(so_far + d, load(so_far + d) * factor);
    }
}

// Multiplies a block of weights by their factors of dropout. query: the number of the block's first query among those of
// all sequences and heads.
void drop(const Shape& s, bool diagonal, uint64_t query, long k0, float* weights) {
    for (long r = 0; r < BLOCK; r++) {
        const Dropout dropout(s.dropout, s.seed, query + r);
        for (long c = 0; c < keys_needed(r, diagonal); c += W) {
            float* weight = weights + r * BLOCK + c;
            store(weight, load(weight) * dropout.factors(k0 + c));
        }
    }
}

template <class T>
void forward(const T* heads, T* y, float* lse, const Shape& s, long threads) {
    const long batch = s.batch, tokens = s.tokens, n_head = s.n_head, n_kv_head = s.n_kv_head, width = s.width,
               window = s.window;
    const long n = s.packed(), columns = s.columns();
    const std::unique_ptr<float[]> scratch(new float[threads * s.scratch()]);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long task = 0; task < batch * n_kv_head; task++) {
        const long sequence = task / n_kv_head, kv = task % n_kv_head;
        float* free = scratch.get() + omp_get_thread_num() * s.scratch();
        const auto take = [&](long floats) { float* taken = free; free += floats; return taken; };
        float *q = take(n), *kt = take(n), *v = take(n), *out = take(BLOCK * columns);
        float *scores = take(BLOCK * BLOCK), *highest = take(BLOCK), *total = take(BLOCK);
        const T* here = heads + sequence * tokens * s.token();
        if (sequence + 1 < batch) prefetch(here + tokens * s.token(), tokens * s.token(), kv, n_kv_head);
        pack_transposed(s, here + (n_head + kv) * width, s.token(), kt);
        pack(s, here + (n_head + n_kv_head + kv) * width, s.token(), 1, v);
        for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++) {
            pack(s, here + head * width, s.token(), s.scale(), q);
            for (long q0 = 0; q0 < s.rows(); q0 += BLOCK) {
                std::fill(highest, highest + BLOCK, -INFINITY);
                std::fill(total, total + BLOCK, 0.0f);
                std::memset(out, 0, BLOCK * columns * sizeof(float));
                for (long k0 = std::max(0L, q0 - window + 1) / BLOCK * BLOCK; k0 <= q0; k0 += BLOCK) {
                    products(s, q, kt, q0, k0, scores);
                    if (s.hides(q0, k0)) hide(s, q0, k0, scores);
                    online_softmax(s, k0 == q0, scores, highest, total, out);
                    if (s.dropout > 0) drop(s, k0 == q0, (sequence * n_head + head) * tokens + q0, k0, scores);
                    for (long r = 0; r < BLOCK; r += MR)
                        for (long d = 0; d < columns; d += NR)
                            add(0, k0 == q0 ? r + MR : BLOCK, scores + r * BLOCK, BLOCK, 1, v + k0 * columns + d,
                                columns, out + r * columns + d, columns);
                }
                for (long r = 0; r < BLOCK && q0 + r < tokens; r++) {
                    T* to = y + ((sequence * tokens + q0 + r) * n_head + head) * width;
                    const float inverse = 1 / total[r];
                    for (long d = 0; d < width; d += W)
                        store_part(to + d, load(out + r * columns + d) * inverse, width - d);
                    lse[(sequence * n_head + head) * tokens + q0 + r] = highest[r] + std::log(total[r]);
                }
            }
        }
    }
}

template <class T>
void backward(const T* heads, const T* y, const float* lse, const T* dy, T* dheads, const Shape& s, long threads) {
    const long batch = s.batch, tokens = s.tokens, n_head = s.n_head, n_kv_head = s.n_kv_head, width = s.width,
               window = s.window;
    const long n = s.packed(), columns = s.columns();
    const std::unique_ptr<float[]> scratch(new float[threads * s.scratch()]);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long task = 0; task < batch * n_kv_head; task++) {
        const long sequence = task / n_kv_head, kv = task % n_kv_head;
        float* free = scratch.get() + omp_get_thread_num() * s.scratch();
        const auto take = [&](long floats) { float* taken = free; free += floats; return taken; };
        float *q = take(n), *k = take(n), *kt = take(n), *vt = take(n), *dout = take(n);
        float *dq = take(n), *dk = take(n), *dv = take(n);
        float *weights = take(BLOCK * BLOCK), *dscores = take(BLOCK * BLOCK);
        float *norm = take(s.rows()), *delta = take(s.rows());
        const T* here = heads + sequence * tokens * s.token();
        T* dhere = dheads + sequence * tokens * s.token();
        if (sequence + 1 < batch) {
            const long of_y = tokens * n_head * width;
            prefetch(here + tokens * s.token(), tokens * s.token(), kv, n_kv_head);
            prefetch(y + (sequence + 1) * of_y, of_y, kv, n_kv_head);
            prefetch(dy + (sequence + 1) * of_y, of_y, kv, n_kv_head);
        }
        pack(s, here + (n_head + kv) * width, s.token(), 1, k);
        pack_transposed(s, here + (n_head + kv) * width, s.token(), kt);
        pack_transposed(s, here + (n_head + n_kv_head + kv) * width, s.token(), vt);
        std::memset(dk, 0, n * sizeof(float));
        std::memset(dv, 0, n * sizeof(float));
        std::memset(norm, 0, s.rows() * sizeof(float));
        std::memset(delta, 0, s.rows() * sizeof(float));
        for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++) {
            const long first = (sequence * tokens * n_head + head) * width;
            pack(s, here + head * width, s.token(), s.scale(), q);
            pack(s, dy + first, n_head * width, 1, dout);
            std::memset(dq, 0, n * sizeof(float));
            for (long t = 0; t < tokens; t++) {  // sum over keys of weight times its gradient = sum of y dy
                const T* of_token = y + first + t * n_head * width;
                vec sums{};
                for (long d = 0; d < width; d += W)
                    sums += load_part(of_token + d, width - d) * load(dout + t * columns + d);
                delta[t] = sum_of(sums);
                norm[t] = lse[(sequence * n_head + head) * tokens + t];
            }
            for (long k0 = 0; k0 < s.rows(); k0 += BLOCK) {
                const long end = std::min(s.rows(), round_up(std::min(k0 + BLOCK - 1 + window, s.rows()), BLOCK));
                for (long q0 = k0; q0 < end; q0 += BLOCK) {
                    const bool diagonal = q0 == k0;
                    products(s, q, kt, q0, k0, weights);
                    if (s.hides(q0, k0)) hide(s, q0, k0, weights);
                    products(s, dout, vt, q0, k0, dscores);
                    const uint64_t query = (sequence * n_head + head) * tokens + q0;
                    if (s.dropout > 0) drop(s, diagonal, query, k0, dscores);
                    for (long r = 0; r < BLOCK; r++)
                        for (long c = 0; c < keys_needed(r, diagonal); c += W) {
                            float *weight = weights + r * BLOCK + c, *dscore = dscores + r * BLOCK + c;
                            const vec p = exponential(load(weight) - norm[q0 + r]);
                            store(weight, p);
                            store(dscore, p * (load(dscore) - delta[q0 + r]));
                        }
                    if (s.dropout > 0) drop(s, diagonal, query, k0, weights);
                    for (long r = 0; r < BLOCK; r += MR)
                        for (long d = 0; d < columns; d += NR) {
                            add(0, diagonal ? r + MR : BLOCK, dscores + r * BLOCK, BLOCK, 1, k + k0 * columns + d,
                                columns, dq + (q0 + r) * columns + d, columns);
                            add(diagonal ? r : 0, BLOCK, dscores + r, 1, BLOCK, q + q0 * columns + d, columns,
                                dk + (k0 + r) * columns + d, columns);
                            add(diagonal ? r : 0, BLOCK, weights + r, 1, BLOCK, dout + q0 * columns + d, columns,
                                dv + (k0 + r) * columns + d, columns);
                        }
                }
            }
            unpack(s, dq, s.scale(), dhere + head * width, s.token());
        }
        unpack(s, dk, 1, dhere + (n_head + kv) * width, s.token());
        unpack(s, dv, 1, dhere + (n_head + n_kv_head + kv) * width, s.token());
    }
}

}  // namespace

extern "C" {

// dropout: in [0, 1]; seed: which weights it zeroes.
void attention_forward(long narrow, const void* heads, void* y, float* lse, long batch, long tokens, long n_head,
                       long n_kv_head, long width, long window, float dropout, long seed, long threads) {
    const Shape s{batch, tokens, n_head, n_kv_head, width, window, dropout, (uint64_t)seed};
    BY_TYPE(narrow, forward(in<T>(heads), out<T>(y), lse, s, threads))
}

void attention_backward(long narrow, const void* heads, const void* y, const float* lse, const void* dy, void* dheads,
                        long batch, long tokens, long n_head, long n_kv_head, long width, long window, float dropout,
                        long seed, long threads) {
    const Shape s{batch, tokens, n_head, n_kv_head, width, window, dropout, (uint64_t)seed};
    BY_TYPE(narrow, backward(in<T>(heads), in<T>(y), lse, in<T>(dy), out<T>(dheads), s, threads))
}
}
