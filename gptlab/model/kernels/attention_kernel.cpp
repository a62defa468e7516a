// Causal attention on a CPU, forward and backward, in one pass over blocks that stay in the cache.
//
// Heads are `real`, and so are the operands of all products; scores and sums are float32.
//
// Scores of 64 queries against 64 keys exist at one time (online softmax, as in FlashAttention, arXiv:2205.14135; the
// backward pass recomputes them from the log-sum-exp, arXiv:2307.08691). What causality hides is skipped, down to tiles
// of the diagonal blocks. docs/LOG.md, 2026-11-20, compares it with batched products and a fused softmax.
//
// A block of tokens is packed when it is first needed, and forgotten when its window is over.
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

#include "parts.h"
#include "products.h"
#include "scratch.h"
#include "tasks.h"

#include <algorithm>
#include <cmath>

namespace attention {  // whose tiles are not those of panels.h
namespace {

// Rows of a tile, and vectors of its columns.
#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 8, NV = 2;
#elif defined(__AVX__)
constexpr int VECTOR_ROWS = 4, NV = 2;
#else
constexpr int VECTOR_ROWS = 4, NV = 4;
#endif
constexpr int NR = W * NV;
// Float32 is multiplied by vectors: by AMX, splitting scores into terms takes what products save (docs/LOG.md, 2026-11-30).
constexpr bool BY_AMX = ::BY_AMX && PAIRS;
typedef std::conditional_t<PAIRS, pair, float> unit;
constexpr long PER_UNIT = PAIRS ? 2 : 1;
constexpr int MR = BY_AMX ? 32 : VECTOR_ROWS;
constexpr long BLOCK = 64;
static_assert(BLOCK % NR == 0 && BLOCK % MR == 0 && std::max(W, MR) % std::min(W, MR) == 0, "blocks are whole tiles");

struct Shape {
    long batch, tokens, n_head, n_kv_head, width, window, key_offset;
    float dropout;  // the share of weights that become 0
    uint64_t seed;
    long rows() const { return round_up(tokens, BLOCK); }  // of a packed head: whole blocks, zeros at the end
    long columns() const { return round_up(width, NR); }   // likewise
    // Rows of the blocks that are packed at one time: those that a block of queries sees, or that see a block of keys. The
    // block at q0 is at place(q0) of them.
    long ring() const { return std::min(rows(), round_up(std::min(window, tokens) - 1, BLOCK) + BLOCK); }
    long place(long q0) const { return q0 % ring(); }
    long count(long q0) const { return std::min(BLOCK, tokens - q0); }  // tokens of a block
    long token() const { return (n_head + 2 * n_kv_head) * width; }
    long group() const { return n_head / n_kv_head; }
    float scale() const { return 1 / std::sqrt((float)width); }
    // Whether heads need no zeros after their rows and columns: products may then read them where they are.
    bool whole() const { return tokens == rows() && width == columns(); }
    // Floats of memory that each thread needs.
    long scratch() const {
        return group() * ring() * (3 * columns() + 2) + (6 * BLOCK + 1) * columns() + 4 * BLOCK * BLOCK;
    }
    // Whether a query of the block at q0 may not see some key of the block at k0.
    bool hides(long q0, long k0) const { return k0 == q0 || k0 + window < q0 + BLOCK; }
};

// A thread's memory, taken in parts that begin with a line of the cache: by AMX, attention takes 1.25 and 1.36 times as
// long, forward and backward, where vectors and rows of registers lie in two lines each (docs/LOG.md, 2026-11-28).
class Scratch {
  public:
    explicit Scratch(float* memory) : next(memory) {}

    // For `count` numbers, whole lines of them.
    template <class E>
    E* numbers(long count) {
        float* taken = next;
        next += count * sizeof(E) / sizeof(float);
        return reinterpret_cast<E*>(taken);
    }

    // For the units of `count` numbers.
    unit* units(long count) { return reinterpret_cast<unit*>(numbers<real>(count)); }

  private:
    float* next;
};

// Prefetches the row that is AHEAD rows further on: the rows of a single head are too far apart for the processor's own
// prefetcher. In float32 on Zen 3, attention takes 1.05 to 1.17 times as long without it, and its backward pass 1.04 to
// 1.08 times (docs/LOG.md, 2026-11-26).
void prefetch_ahead(const real* row, long stride, long width) {
    constexpr long AHEAD = 16;
    prefetch(row + AHEAD * stride, width);
}

// Calls use(from, to) for both runs of channels of the slower half of the rotary frequencies (slow_channels of
// model/attention.py).
template <class Use>
void slow_channels(long width, Use use) {
    const long half = std::max(1L, width / 2), quarter = (half + 1) / 2;
    use(quarter, half);
    use(half + quarter, 2 * half);
}

// The keys of a block of a head, (count, width), those channels of each from the token before.
void offset_keys(const Shape& s, const real* keys, long k0, real* to) {
    for (long i = 0; i < s.count(k0); i++) {
        const real *own = keys + (k0 + i) * s.token(), *before = k0 + i ? own - s.token() : own;
        prefetch_ahead(own, s.token(), s.width);
        std::copy(own, own + s.width, to + i * s.width);
        slow_channels(s.width, [&](long a, long b) { std::copy(before + a, before + b, to + i * s.width + a); });
    }
}

// Their gradients, in place, of `count` tokens from t0 on and the one after: from those of keys as queries see them to those
// of tokens. The last token's channels are seen by nobody, and the first token's twice.
void offset_gradients(const Shape& s, long t0, long count, float* rows) {
    slow_channels(s.width, [&](long a, long b) {
        for (long i = 0; i < count; i++)
            for (long d = a; d < b; d++) {
                float* own = rows + i * s.columns() + d;
                *own = (t0 + i ? 0 : *own) + (t0 + i + 1 < s.tokens ? own[s.columns()] : 0);
            }
    });
}

// A block of `count` rows of `width` numbers, `stride` apart -> (BLOCK, columns), units along the width.
void pack(const Shape& s, const real* from, long stride, long count, unit* to) {
    const long units = s.columns() / PER_UNIT;
    for (long t = 0; t < count; t++) {
        const real* row = from + t * stride;
        prefetch_ahead(row, stride, s.width);
        for (long u = 0; u < units; u += W)
            store(to + t * units + u, load_units(row + u * PER_UNIT, std::max(0L, s.width - u * PER_UNIT)));
    }
    std::fill(to + count * units, to + BLOCK * units, unit());
}

// The same, transposed: (columns, BLOCK), units along the columns.
void pack_transposed(const Shape& s, const real* from, long stride, long count, unit* to) {
    const long units = s.columns() / PER_UNIT;
    for (long t = 0; t < BLOCK; t += W) {
        for (long i = 0; i < W; i++) prefetch_ahead(from + (t + i) * stride, stride, s.width);
        for (long u = 0; u < units; u += W) {
            vec square[W];
            const long d = u * PER_UNIT;
            load_transposed(from + t * stride + d, stride, count - t, s.width - d, square);
            for (long i = 0; i < W; i++) store(to + (u + i) * BLOCK + t, square[i]);
        }
    }
}

// The same -> (BLOCK, columns), units along the rows.
void pack_along_tokens(const Shape& s, const real* from, long stride, long count, unit* to) {
    for (long t = 0; t < BLOCK; t += PER_UNIT) {
        for (long i = 0; i < PER_UNIT; i++) prefetch_ahead(from + (t + i) * stride, stride, s.width);
        for (long d = 0; d < s.columns(); d += W)
            store(to + t / PER_UNIT * s.columns() + d,
                  load_units_down(from + t * stride + d, stride, count - t, std::max(0L, s.width - d)));
    }
}

// Rows of sums of `count` tokens -> those of heads.
void unpack(const Shape& s, const float* packed, long count, float scale, real* to) {
    for (long t = 0; t < count; t++)
        vectors(s.width, [&](long d, auto n) {
            store_part(to + t * s.token() + d, load(packed + t * s.columns() + d) * scale, n);
        });
}

// A tile of C = A B, or of C + A B, as `tile` of products.h. By AMX, a_column is 1.
template <bool ADD>
inline void product(long depth, const unit* a, long a_row, long a_column, const unit* b, long b_row, float* c, long c_row) {
    if constexpr (BY_AMX)
        amx_tile(depth, (const ::unit*)a, a_row, 16, (const ::unit*)b, b_row, ADD, c, c_row);
    else
        tile<MR, NV, ADD>(depth, a, a_row, a_column, b, b_row, c, c_row);
}

// A block of a head as the left operand of products: rows, `row` units apart.
struct Rows {
    const unit* first;
    long row;
};

// out (BLOCK, BLOCK) = a block of queries times one of keys, transposed. Tiles that no query sees are 0.
void products(long units, Rows left, const unit* transposed, bool diagonal, float* out) {
    for (long r = 0; r < BLOCK; r += MR)
        for (long c = 0; c < BLOCK; c += NR)
            if (!diagonal || c < r + MR)
                product<false>(units, left.first + r * left.row, left.row, 1, transposed + c, BLOCK, out + r * BLOCK + c,
                               BLOCK);
            else
                for (long i = r; i < r + MR; i++) std::memset(out + i * BLOCK + c, 0, NR * sizeof(float));
}

// C += the sum over k in [from, to), which count numbers, not units.
inline void add(long from, long to, const unit* a, long a_row, long a_column, const unit* b, long b_row, float* c,
                long c_row) {
    from /= PER_UNIT, to /= PER_UNIT;
    product<true>(to - from, a + from * a_column, a_row, a_column, b + from * b_row, b_row, c, c_row);
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
long keys_needed(long r, bool diagonal) {
    return diagonal ? round_up(r + 1, std::max(W, MR)) : BLOCK;
}

// The factors of dropout for query r of a block whose first query is `first` among those of all sequences and heads.
Dropout dropout_of(const Shape& s, uint64_t first, long r) {
    return s.dropout > 0 ? Dropout(s.dropout, s.seed, first + r) : Dropout();
}

// Adds a block of scores for each query: updates `highest` and `total`, makes weights relative to the new highest, and
// rescales `out` so far. weights: (BLOCK, BLOCK), which may be the memory of the scores.
void online_softmax(const Shape& s, bool diagonal, uint64_t first, long k0, const float* scores, real* weights,
                    float* highest, float* total, float* out) {
    const float scale = s.scale();
    const bool drops = s.dropout > 0;
    float shift[BLOCK], factor[BLOCK];
    for (long r = 0; r < BLOCK; r++) {
        const float* row = scores + r * BLOCK;
        vec top = load(row);
        for (long c = W; c < keys_needed(r, diagonal); c += W) {
            const vec z = load(row + c);
            top = select(z > top, z, top);
        }
        shift[r] = scale * highest_of(top);
    }
    for (long r = 0; r < BLOCK; r += W) {
        const vec before = load(highest + r), block = load(shift + r), now = select(block > before, block, before);
        const vec by = select(now == all(-INFINITY), vec{}, now);  // rows of which the window hides all keys so far
        store(shift + r, by);
        store(factor + r, exponential(before - by));
        store(highest + r, now);
    }
    for (long r = 0; r < BLOCK; r++) {
        const Dropout dropout = dropout_of(s, first, r);
        vec sums{};
        for (long c = 0; c < keys_needed(r, diagonal); c += W) {
            vec weight = exponential_of<real>(load(scores + r * BLOCK + c), scale, shift[r]);
            sums += weight;
            if (drops) weight *= dropout.factors(k0 + c);
            store(weights + r * BLOCK + c, weight);
        }
        total[r] = total[r] * factor[r] + sum_of(sums);
        float* so_far = out + r * s.columns();
        if (factor[r] != 1)
            for (long d = 0; d < s.columns(); d += W) store(so_far + d, load(so_far + d) * factor[r]);
    }
}

// Transposes units down the queries (BLOCK / 2, BLOCK): AMX takes the depth of a left operand along its rows.
void turn(unit* units) {
    unit copy[BLOCK / 2 * BLOCK];
    std::memcpy(copy, units, sizeof copy);
    for (long u = 0; u < BLOCK / 2; u += W)
        for (long c = 0; c < BLOCK; c += W)
            transpose_square(copy + u * BLOCK + c, BLOCK, W, units + c * (BLOCK / 2) + u, BLOCK / 2);
}

// Turns a block of scores and `dweights`, the gradients of their weights, into weights and the gradients of the scores, in
// the forms that products take: units along the keys, or "down" along the queries. In float32 that is the same memory.
void score_gradients(const Shape& s, bool diagonal, uint64_t first, long k0, const float* lse, const float* delta,
                     const float* scores, const float* dweights, real* dscores, unit* dscores_down, unit* weights_down) {
    const float scale = s.scale();
    const bool drops = s.dropout > 0;
    constexpr long N = PER_UNIT;  // rows at a time
    for (long r = 0; r < BLOCK; r += N) {
        Dropout dropout[N];
        for (long i = 0; i < N; i++) dropout[i] = dropout_of(s, first, r + i);
        for (long c = 0; c < keys_needed(r, diagonal); c += W) {
            vec weight[N], gradient[N];
            for (long i = 0; i < N; i++) {
                const long at = (r + i) * BLOCK + c;
                const vec p = exponential_of<real>(load(scores + at), scale, lse[r + i]);
                vec kept = all(1.0f);
                if (drops) kept = dropout[i].factors(k0 + c);
                weight[i] = p * kept;
                gradient[i] = p * (load(dweights + at) * kept - delta[r + i]);
            }
            if constexpr (!PAIRS) {
                store(weights_down + r * BLOCK + c, weight[0]);
                store(dscores + r * BLOCK + c, gradient[0]);
            } else {
                const half_vec g0 = narrow(gradient[0]), g1 = narrow(gradient[1]);
                std::memcpy(dscores + r * BLOCK + c, &g0, sizeof g0);
                std::memcpy(dscores + (r + 1) * BLOCK + c, &g1, sizeof g1);
                store(dscores_down + r / 2 * BLOCK + c, pairs(g0, g1));
                store(weights_down + r / 2 * BLOCK + c, pairs(narrow(weight[0]), narrow(weight[1])));
            }
        }
    }
    if constexpr (BY_AMX) turn(dscores_down), turn(weights_down);
}

void forward(const real* heads, real* y, float* lse, const Shape& s, long threads) {
    const long batch = s.batch, tokens = s.tokens, n_head = s.n_head, n_kv_head = s.n_kv_head, width = s.width,
               window = s.window;
    const long ring = s.ring(), columns = s.columns(), units = columns / PER_UNIT, row = BLOCK / PER_UNIT;
    const Rooms<float> memory(threads, s.scratch());
    Tasks tasks(threads);
#pragma omp parallel num_threads(threads)
    {
        const Registers registers{};
        tasks.each(batch * n_kv_head, [&](long task) {
            const long sequence = task / n_kv_head, kv = task % n_kv_head;
            Scratch scratch(memory.own());
            auto* q = scratch.units(BLOCK * columns);
            auto *kt = scratch.units(ring * columns), *v = scratch.units(ring * columns);
            auto *out = scratch.numbers<float>(BLOCK * columns), *scores = scratch.numbers<float>(BLOCK * BLOCK);
            auto *highest = scratch.numbers<float>(BLOCK), *total = scratch.numbers<float>(BLOCK);
            auto* offset = scratch.numbers<real>(s.key_offset * BLOCK * width);
            auto* weights = PAIRS ? scratch.numbers<real>(BLOCK * BLOCK) : (real*)scores;
            for (long q0 = 0; q0 < s.rows(); q0 += BLOCK) {
                const long count = s.count(q0);
                const real* here = heads + (sequence * tokens + q0) * s.token();
                const real *keys = here + (n_head + kv) * width, *values = here + (n_head + n_kv_head + kv) * width;
                if (s.key_offset) offset_keys(s, keys - q0 * s.token(), q0, offset), keys = offset;
                pack_transposed(s, keys, s.key_offset ? width : s.token(), count, kt + s.place(q0) * units);
                pack_along_tokens(s, values, s.token(), count, v + s.place(q0) * units);
                for (long head = kv * s.group(); head < (kv + 1) * s.group(); head++) {
                    Rows queries{reinterpret_cast<const unit*>(here + head * width), s.token() / PER_UNIT};
                    if (!s.whole()) pack(s, here + head * width, s.token(), count, q), queries = {q, units};
                    std::fill(highest, highest + BLOCK, -INFINITY);
                    std::fill(total, total + BLOCK, 0.0f);
                    std::memset(out, 0, BLOCK * columns * sizeof(float));
                    for (long k0 = std::max(0L, q0 - window + 1) / BLOCK * BLOCK; k0 <= q0; k0 += BLOCK) {
                        const bool diagonal = k0 == q0;
                        const uint64_t query = (sequence * n_head + head) * tokens + q0;
                        products(units, queries, kt + s.place(k0) * units, diagonal, scores);
                        if (s.hides(q0, k0)) hide(s, q0, k0, scores);
                        online_softmax(s, diagonal, query, k0, scores, weights, highest, total, out);
                        const auto *a = reinterpret_cast<const unit*>(weights), *of_k = v + s.place(k0) * units;
                        for (long r = 0; r < BLOCK; r += MR)
                            for (long d = 0; d < columns; d += NR)
                                add(0, diagonal ? r + MR : BLOCK, a + r * row, row, 1, of_k + d, columns,
                                    out + r * columns + d, columns);
                    }
                    for (long r = 0; r < count; r++) {
                        real* to = y + ((sequence * tokens + q0 + r) * n_head + head) * width;
                        const float inverse = 1 / total[r];
                        vectors(width, [&](long d, auto n) {
                            store_part(to + d, load(out + r * columns + d) * inverse, n);
                        });
                        lse[(sequence * n_head + head) * tokens + q0 + r] = highest[r] + std::log(total[r]);
                    }
                }
            }
        });
    }
}

// What the backward pass has of the queries of a head, as many blocks as are packed at one time.
struct Queries {
    unit *q, *dout;            // rows, unless products read them where they are
    unit *q_down, *dout_down;  // units along the tokens; in float32 that is the same
    float *dq, *norm, *delta;

    Queries() = default;

    Queries(Scratch& scratch, long rows, long columns)
        : q(scratch.units(rows * columns)), dout(scratch.units(rows * columns)),
          q_down(PAIRS ? scratch.units(rows * columns) : q), dout_down(PAIRS ? scratch.units(rows * columns) : dout),
          dq(scratch.numbers<float>(rows * columns)), norm(scratch.numbers<float>(rows)),
          delta(scratch.numbers<float>(rows)) {}

    // Rows as the left operand: those that are packed, or in place.
    static Rows rows(const Shape& s, const unit* packed, const real* in_place, long stride) {
        if (PAIRS && s.whole()) return {reinterpret_cast<const unit*>(in_place), stride / PER_UNIT};
        return {packed, s.columns() / PER_UNIT};
    }

    // Packs a block, which is to be at the row `at`. q, y, dy, lse: where its first token is.
    void begin(const Shape& s, long at, long count, const real* q_rows, const real* y, const real* dy, const float* lse) {
        const long columns = s.columns(), first = at * columns / PER_UNIT, of_token = s.n_head * s.width;
        if (!PAIRS || !s.whole()) {
            pack(s, q_rows, s.token(), count, q + first);
            pack(s, dy, of_token, count, dout + first);
        }
        if constexpr (PAIRS) {
            pack_along_tokens(s, q_rows, s.token(), count, q_down + first);
            pack_along_tokens(s, dy, of_token, count, dout_down + first);
        }
        std::memset(dq + at * columns, 0, BLOCK * columns * sizeof(float));
        std::memset(norm + at, 0, BLOCK * sizeof(float));
        std::memset(delta + at, 0, BLOCK * sizeof(float));
        std::copy(lse, lse + count, norm + at);
        for (long t = 0; t < count; t++) {  // sum over keys of weight times its gradient = sum of y dy
            prefetch_ahead(y + t * of_token, of_token, s.width);
            vec sums{};
            vectors(s.width, [&](long d, auto n) {
                sums += load_part(y + t * of_token + d, n) * load_part(dy + t * of_token + d, n);
            });
            delta[at + t] = sum_of(sums);
        }
    }
};

void backward(const real* heads, const real* y, const float* lse, const real* dy, real* dheads, const Shape& s,
              long threads) {
    const long batch = s.batch, tokens = s.tokens, n_head = s.n_head, n_kv_head = s.n_kv_head, width = s.width,
               window = s.window;
    const long ring = s.ring(), columns = s.columns(), units = columns / PER_UNIT, row = BLOCK / PER_UNIT;
    const Rooms<float> memory(threads, s.scratch());
    const std::unique_ptr<Queries[]> all_heads(new Queries[threads * s.group()]);
    Tasks tasks(threads);
#pragma omp parallel num_threads(threads)
    {
        const Registers registers{};
        tasks.each(batch * n_kv_head, [&](long task) {
            const long sequence = task / n_kv_head, kv = task % n_kv_head;
            Scratch scratch(memory.own());
            auto *kt = scratch.units(BLOCK * columns), *vt = scratch.units(BLOCK * columns);
            auto* k_down = scratch.units(BLOCK * columns);  // units along the tokens
            auto *dk = scratch.numbers<float>((BLOCK + 1) * columns), *dv = scratch.numbers<float>(BLOCK * columns);
            auto *scores = scratch.numbers<float>(BLOCK * BLOCK), *dweights = scratch.numbers<float>(BLOCK * BLOCK);
            auto* dscores = PAIRS ? scratch.numbers<real>(BLOCK * BLOCK) : (real*)dweights;
            auto* dscores_down = PAIRS ? scratch.units(BLOCK * BLOCK) : (unit*)dweights;
            auto* weights_down = PAIRS ? scratch.units(BLOCK * BLOCK) : (unit*)scores;
            const auto* dscores_units = reinterpret_cast<const unit*>(dscores);
            auto* offset = scratch.numbers<real>(s.key_offset * BLOCK * width);
            Queries* group = all_heads.get() + omp_get_thread_num() * s.group();
            for (long i = 0; i < s.group(); i++) group[i] = Queries(scratch, ring, columns);
            for (long k0 = 0, begun = 0; k0 < s.rows(); k0 += BLOCK) {
                const long end = std::min(s.rows(), round_up(std::min(k0 + BLOCK - 1 + window, s.rows()), BLOCK));
                const real* here = heads + (sequence * tokens + k0) * s.token();
                real* dhere = dheads + (sequence * tokens + k0) * s.token();
                real *dkeys = dhere + (n_head + kv) * width, *dvalues = dhere + (n_head + n_kv_head + kv) * width;
                const real *keys = here + (n_head + kv) * width, *values = here + (n_head + n_kv_head + kv) * width;
                if (s.key_offset) offset_keys(s, keys - k0 * s.token(), k0, offset), keys = offset;
                pack_along_tokens(s, keys, s.key_offset ? width : s.token(), s.count(k0), k_down);
                pack_transposed(s, keys, s.key_offset ? width : s.token(), s.count(k0), kt);
                pack_transposed(s, values, s.token(), s.count(k0), vt);
                std::memset(dk + columns, 0, BLOCK * columns * sizeof(float));  // after the row of the token before
                std::memset(dv, 0, BLOCK * columns * sizeof(float));
                for (long i = 0; i < s.group(); i++) {
                    Queries& own = group[i];
                    const long head = kv * s.group() + i;
                    for (long q0 = k0; q0 < end; q0 += BLOCK) {
                        const bool diagonal = q0 == k0;
                        const long at = s.place(q0), in_ring = at * units;
                        const uint64_t query = (sequence * n_head + head) * tokens + q0;
                        const real* of_q = heads + (sequence * tokens + q0) * s.token() + head * width;
                        const long of_y = ((sequence * tokens + q0) * n_head + head) * width;
                        if (q0 >= begun) own.begin(s, at, s.count(q0), of_q, y + of_y, dy + of_y, lse + query);
                        products(units, own.rows(s, own.q + in_ring, of_q, s.token()), kt, diagonal, scores);
                        if (s.hides(q0, k0)) hide(s, q0, k0, scores);
                        products(units, own.rows(s, own.dout + in_ring, dy + of_y, n_head * width), vt, diagonal, dweights);
                        score_gradients(s, diagonal, query, k0, own.norm + at, own.delta + at, scores, dweights, dscores,
                                        dscores_down, weights_down);
                        const long per_key = BY_AMX ? row : 1, per_unit = BY_AMX ? 1 : BLOCK;
                        for (long r = 0; r < BLOCK; r += MR)
                            for (long d = 0; d < columns; d += NR) {
                                add(0, diagonal ? r + MR : BLOCK, dscores_units + r * row, row, 1, k_down + d, columns,
                                    own.dq + (at + r) * columns + d, columns);
                                add(diagonal ? r : 0, BLOCK, dscores_down + r * per_key, per_key, per_unit,
                                    own.q_down + in_ring + d, columns, dk + (1 + r) * columns + d, columns);
                                add(diagonal ? r : 0, BLOCK, weights_down + r * per_key, per_key, per_unit,
                                    own.dout_down + in_ring + d, columns, dv + r * columns + d, columns);
                            }
                    }
                    // These queries see no later key.
                    unpack(s, own.dq + s.place(k0) * columns, s.count(k0), s.scale(), dhere + head * width);
                }
                begun = end;
                // The last token's keys wait for the next block, which may have gradients of theirs.
                const long first = std::max(0L, k0 - 1), last = k0 + s.count(k0) - (k0 + BLOCK < tokens);
                float* rows = dk + (first - k0 + 1) * columns;
                if (s.key_offset) offset_gradients(s, first, last - first, rows);
                unpack(s, rows, last - first, s.scale(), dkeys + (first - k0) * s.token());
                std::memcpy(dk, dk + BLOCK * columns, columns * sizeof(float));
                unpack(s, dv, s.count(k0), 1, dvalues);
            }
        });
    }
}

}  // namespace
}  // namespace attention

extern "C" {

// key_offset: 1 or 0; dropout: in [0, 1]; seed: which weights it zeroes.
void attention_forward(const real* heads, real* y, float* lse, long batch, long tokens, long n_head, long n_kv_head,
                       long width, long window, long key_offset, float dropout, long seed, long threads) try {
    const attention::Shape s{batch, tokens, n_head, n_kv_head, width, window, key_offset, dropout, (uint64_t)seed};
    attention::forward(heads, y, lse, s, threads);
} catch (const std::bad_alloc&) { ran_out = true; }

void attention_backward(const real* heads, const real* y, const float* lse, const real* dy, real* dheads,
                        long batch, long tokens, long n_head, long n_kv_head, long width, long window, long key_offset,
                        float dropout, long seed, long threads) try {
    const attention::Shape s{batch, tokens, n_head, n_kv_head, width, window, key_offset, dropout, (uint64_t)seed};
    attention::backward(heads, y, lse, dy, dheads, s, threads);
} catch (const std::bad_alloc&) { ran_out = true; }
}
