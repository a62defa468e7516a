// Larger matrix products on a CPU, of operands that are packed into panels: some columns of an operand, all along its depth,
// in the order in which a tile takes them.
//
// A panel is (depth, NR) for the right operand, and (depth, LEFT) for a left one whose depth lies down the rows in memory;
// all in units, with zeros where the matrix ends. Every element of a product is summed by one thread in an order that no
// number of threads changes.

#pragma once

#include "scratch.h"
#include "tasks.h"
#include "terms.h"

#include <climits>
#include <numeric>

namespace {

// Rows of a tile, and vectors of its columns.
#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 12, NV = 2;
#elif defined(__AVX__)
constexpr int VECTOR_ROWS = 6, NV = 2;
#else
constexpr int VECTOR_ROWS = 4, NV = 4;
#endif
constexpr int NR = W * NV;
constexpr long DEPTH = TERMS > 1 ? 2304 : 16384 / NR;  // units of a panel that stay in a core's cache: 64 or 288 KiB

constexpr int MR = BY_AMX ? 32 : VECTOR_ROWS;
constexpr long HEIGHT = BY_AMX ? 128 : 48;  // rows that all panels are multiplied by before the next ones
// Columns of a left operand's panel, as few as whole tiles and vectors permit: a tile reads MR of them, and the cache loads
// the lines of all.
constexpr long LEFT = std::lcm(MR, W);
// Rows and columns of a product that are computed before they are used, and units that are multiplied at a time. In
// bfloat16 more than one panel gains nothing by vectors (Zen 5; docs/LOG.md, 2026-11-27). By AMX, 24 KiB of rows stay in
// the first cache while four panels pass: its tiles take operands faster than the second cache gives them (2026-11-29).
// Of terms, the rows of 384 inputs, 288 KiB, are multiplied by all four panels before the next ones: with all inputs at a
// time, MLPs of 1,536 take 1.03 times as long, and with much fewer, for which sums are stored more often, too (2026-11-30).
constexpr long BLOCK = BY_AMX && PAIRS ? 64 : HEIGHT, SPAN = BY_AMX ? 4 * NR : PAIRS ? NR : 512;
constexpr long UNITS_AT_ONCE = !BY_AMX ? LONG_MAX : PAIRS ? 96 : 1152;
static_assert(HEIGHT % MR == 0 && MR % 2 == 0, "panels have whole tiles and vectors, and tiles whole units");
static_assert(DEPTH % WHOLE == 0 && (TERMS == 1 || UNITS_AT_ONCE % WHOLE == 0), "registers of terms are not parted");

inline long panels_of(long columns) { return (columns + NR - 1) / NR; }

inline long tiles_of(long rows) { return (rows + MR - 1) / MR; }

// The rows of a product as tasks, MOST of them at a time; fewer where threads would get less than four such tasks.
template <long MOST = HEIGHT>
struct RowBlocks {
    long rows, at_once;

    explicit RowBlocks(long rows)
        : rows(rows), at_once(MR * std::clamp(tiles_of(rows) / (4L * omp_get_num_threads()), 1L, MOST / MR)) {}

    long count() const { return (rows + at_once - 1) / at_once; }

    // body(row, height)
    template <class Body>
    void of(long task, Body body) const {
        const long row = task * at_once;
        body(row, std::min(at_once, rows - row));
    }
};

template <long MOST = HEIGHT, class Body>
void row_blocks(Tasks& tasks, long rows, Body body) {
    const RowBlocks<MOST> blocks(rows);
    tasks.each(blocks.count(), [&](long task) { blocks.of(task, body); });
}

// The panels `which` of the transposed of a matrix (rows, width) -> (all panels, units_of(width), NR).
template <class S>
void pack_transposed(const S* matrix, long rows, long width, Share which, unit* panels) {
    const long depth = units_of(width);
    for (long j = which.first; j < which.last; j++)
        for (long r = 0; r < NR; r += W)
            for (long u = 0; u < depth; u += TERMS * W) {
                vec squares[TERMS][W];
                const long row = j * NR + r, column = numbers_of(u);
                load_transposed_terms(matrix + row * width + column, width, rows - row, width - column, squares);
                for (long i = 0; i < std::min<long>(TERMS * W, depth - u); i++)
                    store(panels + (j * depth + u + i) * NR + r, squares[i / W][i % W]);
            }
}

// The units `which`, whole ones, down a matrix (rows, width), whose rows are `stride` apart -> panels of WIDTH of its
// columns, each of which has `depth` units.
template <long WIDTH, class S>
void pack(const S* matrix, long stride, long rows, long width, Share which, long depth, unit* panels) {
    // A few rows of one panel at a time: panels may be a multiple of 4 KiB apart, and then evict each other's lines.
    constexpr long BLOCK = 16;
    for (long u0 = which.first / TERMS; u0 < which.last / TERMS; u0 += BLOCK)
        for (long c = 0; c < width; c += WIDTH)
            for (long u = u0; u < std::min(u0 + BLOCK, which.last / TERMS); u++)
                for (long i = 0; i < WIDTH; i += W) {
                    const long row = number_at(u), n = std::max(0L, width - c - i);
                    for (long r = 0; r < PER_UNIT; r++)
                        __builtin_prefetch(matrix + (row + r * APART) * stride + c + i + 2 * WIDTH);  // as `prefetch`
                    vec units[TERMS];
                    load_terms_down(matrix + row * stride + c + i, stride, rows - row, n, units);
                    for (long t = 0; t < TERMS; t++) store(panels + (c * depth + unit_at(u, t) * WIDTH) + i, units[t]);
                }
}

// From a unit of a packed row to the next, in multiples of W: registers of terms of a tile's rows are packed one below the
// other: steps take 3% less time than with one row after the other (docs/LOG.md, 2026-11-30).
constexpr long ALONG = TERMS > 1 ? MR : 1;

// Rows of a matrix (rows, width), `stride` apart -> whole tiles of them, (tiles * MR, units_of(width)); of terms (tiles,
// units_of(width) / W, MR, W).
void pack_rows(const real* matrix, long stride, long rows, long width, long tiles, unit* to) {
    const long depth = units_of(width), kept = std::min(rows, tiles * MR);
    if constexpr (TERMS > 1) {
        for (long r = 0; r < tiles * MR; r++)
            for (long u = 0; u < depth; u += WHOLE) {
                vec units[TERMS]{};
                if (r < kept) load_terms(matrix + r * stride + numbers_of(u), width - numbers_of(u), units);
                for (long t = 0; t < TERMS; t++)
                    store(to + r / MR * MR * depth + (u + t * W) * ALONG + r % MR * W, units[t]);
            }
    } else {
        if (width % PER_UNIT) std::fill_n(to, kept * depth, unit());
        for (long r = 0; r < kept; r++) std::memcpy(to + r * depth, matrix + r * stride, width * sizeof(real));
        std::fill_n(to + kept * depth, (tiles * MR - kept) * depth, unit());
    }
}

// Whether panels of so many columns have no room in a thread's second cache besides rows and products. By AMX, the next panel
// is then prefetched. If it always is, a step of 4 x 128 takes 1.02 times as long (docs/LOG.md, 2026-11-30).
inline bool are_far(long depth, long columns) { return depth * columns * long(sizeof(unit)) > 1 << 20; }

// c (tiles * MR, columns) = rows (tiles * MR, depth), which are a_row units apart, or packed ones of terms, for which a_row is
// all of their depth, times panels, each of which has `panel_depth` units; or added to what it holds. far: are_far.
void multiply_panels(long tiles, long depth, const unit* rows, long a_row, const unit* panels, long panel_depth,
                     long columns, bool far, bool add, float* c, long c_row) {
    for (long j = 0; j < columns; j += NR, panels += panel_depth * NR)
        for (long k = 0; k < depth; k += DEPTH) {
            const long n = std::min(DEPTH, depth - k);
            for (long i = 0; i < tiles; i++) {
                const unit *a = rows + i * MR * a_row + k * ALONG, *b = panels + k * NR;
                float* to = c + i * MR * c_row + j;
                if constexpr (BY_AMX)
                    amx_tile(n, a, TERMS > 1 ? W : a_row, W * ALONG, b, NR, add || k > 0, to, c_row,
                             far ? b + panel_depth * NR : nullptr, i, tiles);
                else if (!add && k == 0)
                    tile<MR, NV, false>(n, a, a_row, 1, b, NR, to, c_row);
                else
                    tile<MR, NV, true>(n, a, a_row, 1, b, NR, to, c_row);
            }
        }
}

// What stores a product in y (height, columns), whose rows are `stride` apart, or adds it there, rounded before.
struct Into {
    real* y;
    long stride;
    bool add;

    template <class N>
    void operator()(long r, long c, N n, vec v) const {
        real* to = y + r * stride + c;
        store_part(to, add ? rounded<real>(v) + load_part(to, n) : v, n);
    }
};

inline Into into(real* y, long stride, bool add = false) { return {y, stride, add}; }

// The product of `height` rows, a_row units apart, by panels of `columns` columns: at(row, column, n, v) for each vector v of
// it, n numbers of which count, along its rows.
//
// What `at` reads and writes is often in no cache. Along rows the processor prefetches it. With the few columns of a single
// panel it waits at each row: in float32 an MLP's backward pass takes 1.16 to 1.24 times as long up to a width of 128 (Zen
// 3; docs/LOG.md, 2026-11-26).
template <class At>
void multiply(long height, long depth, const unit* rows, long a_row, const unit* panels, long columns, At at) {
    constexpr long ROW = SPAN + NR;  // rows that are a power of two apart would share few places of the cache
    alignas(64) float products[BLOCK * ROW];
    float* y = nullptr;  // where tiles store their sums themselves: a linear layer of terms takes 0.92 of the time
    long y_row = 0;
    if constexpr (TERMS > 1 && std::is_same_v<At, Into>)
        if (!at.add && height % MR == 0 && columns % NR == 0) y = at.y, y_row = at.stride;
    for (long c = 0; c < columns; c += SPAN)
        for (long block = 0; block < height; block += BLOCK) {
            const long wide = std::min(SPAN, columns - c), tall = std::min(BLOCK, height - block);
            for (long k = 0; k < depth; k += std::min(UNITS_AT_ONCE, depth)) {
                const unit* from = rows + block * a_row + k * ALONG;
                multiply_panels(tiles_of(tall), std::min(UNITS_AT_ONCE, depth - k), from, a_row, panels + c * depth + k * NR,
                                depth, wide, are_far(depth, columns), k > 0, y ? y + block * y_row + c : products,
                                y ? y_row : ROW);
            }
            for (long r = 0; r < tall && !y; r++)
                vectors(wide, [&](long i, auto n) { at(block + r, c + i, n, load(products + r * ROW + i)); });
        }
}

// Units along rows that are the depth of a product: by AMX whole registers of them.
inline long depth_of(long rows) { return units_of(BY_AMX ? round_up(rows, MR) : rows); }

// The units of a depth that a thread packs: by AMX those of whole registers.
inline Share depth_share(long depth, long thread, long threads) {
    const long whole = BY_AMX ? units_of(MR) : 1;
    const Share share((depth + whole - 1) / whole, thread, threads);
    return {share.first * whole, std::min(share.last * whole, depth)};
}

// By AMX, the depth of the left operand of an outer product has to lie along rows. It is the one with fewer columns: then
// less is turned.
inline bool x_is_left(long outputs, long inputs) { return inputs < outputs; }

// Packs an operand of `add_outer_products`.
template <long WIDTH, class S>
void pack_outer(const S* matrix, long stride, long rows, long width, Share which, long depth, bool left, unit* panels) {
    pack<WIDTH>(matrix, stride, rows, width, which, depth, panels);
    if constexpr (BY_AMX)
        if (left) turn_panels(panels, panels_of(width), depth, which.first, which.last);
}

// A part of a result, of a grid of such parts that are about as large as each other.
struct Part {
    Share tiles, panels;
};

inline Part part_of(long tiles, long panels, long thread, long threads) {
    long across = 1, least = tiles * panels + 1;
    for (long n = 1; n <= threads; n++)
        if (threads % n == 0) {
            const long most = ((tiles * n + threads - 1) / threads) * ((panels + n - 1) / n);
            if (most < least) least = most, across = n;
        }
    return {Share(tiles, thread / across, threads / across), Share(panels, thread % across, across)};
}

// c (outputs, inputs) = the sum over some rows of dy (rows, outputs) x (rows, inputs), added to what it holds unless these
// are the first ones. dy: panels of LEFT columns; x: panels of NR. `at_once`: units that are summed in registers.
void add_outer_products(const unit* dy, const unit* x, long depth, long at_once, long outputs, long inputs, Part part,
                        bool first, float* c) {
    if constexpr (BY_AMX)
        return add_outer_products_by_amx(dy, x, x_is_left(outputs, inputs), depth, outputs, inputs, part,
                                         are_far(depth, std::max(outputs, inputs)), first, c);
    for (long from = 0; from < depth; from += at_once) {
        const long n = std::min(at_once, depth - from);
        const bool replace = first && from == 0;
        for (long t = part.tiles.first; t < part.tiles.last; t++)
            for (long j = part.panels.first; j < part.panels.last; j++) {
                const unit* a = dy + (t * MR / LEFT * depth + from) * LEFT + t * MR % LEFT;
                const unit* b = x + (j * depth + from) * NR;
                const long height = std::min<long>(MR, outputs - t * MR), width = std::min<long>(NR, inputs - j * NR);
                float* to = c + t * MR * inputs + j * NR;
                for (long i = 0; i < height && !replace; i++) __builtin_prefetch(to + i * inputs, 1);
                if (height < MR || width < NR) {
                    float edge[MR * NR];
                    tile<MR, NV, false>(n, a, 1, LEFT, b, NR, edge, NR);
                    for (long i = 0; i < height; i++)
                        for (long k = 0; k < width; k++)
                            to[i * inputs + k] = edge[i * NR + k] + (replace ? 0 : to[i * inputs + k]);
                } else if (replace) {
                    tile<MR, NV, false>(n, a, 1, LEFT, b, NR, to, inputs);
                } else {
                    tile<MR, NV, true>(n, a, 1, LEFT, b, NR, to, inputs);
                }
            }
    }
}

// Such sums, of which N are computed in parts as tasks of one set: a thread then waits for others less often. With a set
// for each, and one for the gradients of inputs, the backward pass of an MLP takes 1.13 times as long by AMX, that of a
// linear layer 1.09 times (docs/LOG.md, 2026-11-29).
struct OuterProduct {
    const unit *dy, *x;
    long outputs, inputs;
    float* c;
};

template <std::size_t N>
struct OuterProducts {
    const OuterProduct (&products)[N];
    long depth, at_once;
    bool first;
    long parts = omp_get_num_threads() > 1 ? 4 * omp_get_num_threads() : 1;

    long count() const { return N * parts; }

    void of(long task) const {
        const auto& [dy, x, outputs, inputs, c] = products[task / parts];
        const Part part = part_of(tiles_of(outputs), panels_of(inputs), task % parts, parts);
        add_outer_products(dy, x, depth, at_once, outputs, inputs, part, first, c);
    }
};

}  // namespace
