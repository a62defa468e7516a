// How a token's queries, keys and values are prepared for attention, and their gradients.

#pragma once

#include "vectors.h"

#include <cmath>

namespace {

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Queries and keys: rotated by cos and sin (tokens, width / 2), where they are not null, then divided by their root mean
// square, unless eps is negative. Values: plus 2 sigmoid(gate) times those of an embedding.
struct Heads {
    long tokens, n_head, n_kv_head, width;  // row i of many is that of token i % tokens
    const float *cos, *sin;
    float eps;

    long token() const { return (n_head + 2 * n_kv_head) * width; }
    long rotated() const { return n_head + n_kv_head; }

    // from: of this row. gates (n_kv_head): of this row, or null. embedding (rows, n_kv_head, width), out (rows, token) and
    // inverse (rows, rotated), what queries and keys were multiplied by: of all rows. turned: room for `width` numbers.
    void prepare(long row, const real* from, const real* gates, const real* embedding, real* out, float* inverse,
                 float* turned) const {
        const long half = width / 2, table = row % tokens * half;
        real* to = out + row * token();
        for (long head = 0; head < rotated(); head++, from += width, to += width) {
            if (cos)
                vectors(half, [&](long i, auto n) {
                    const vec c = load_part(cos + table + i, n), si = load_part(sin + table + i, n);
                    const vec first = load_part(from + i, n), second = load_part(from + half + i, n);
                    store_part(turned + i, first * c + second * si, n);
                    store_part(turned + half + i, second * c - first * si, n);
                });
            else
                vectors(width, [&](long i, auto n) { store_part(turned + i, load_part(from + i, n), n); });
            float factor = 1;
            if (eps >= 0) {
                vec squares{};
                vectors(width, [&](long i, auto n) {
                    const vec v = load_part(turned + i, n);
                    squares += v * v;
                });
                factor = inverse[row * rotated() + head] = 1 / std::sqrt(sum_of(squares) / width + eps);
            }
            vectors(width, [&](long i, auto n) { store_part(to + i, load_part(turned + i, n) * factor, n); });
        }
        for (long kv = 0; kv < n_kv_head; kv++, from += width, to += width) {
            const float gate = gates ? 2 * sigmoid(wide(gates[kv])) : 0;
            vectors(width, [&](long i, auto n) {
                vec v = load_part(from + i, n);
                if (gates) v += load_part(embedding + (row * n_kv_head + kv) * width + i, n) * gate;
                store_part(to + i, v, n);
            });
        }
    }

    // The gradients of `from`, of the gates and of the embedding. to: of this row; all others: of all rows.
    void gradient(long row, const real* dout, const real* out, const float* inverse, const real* gates,
                  const real* embedding, real* to, real* dgates, real* dembedding, float* turned) const {
        constexpr long AHEAD = 4;  // see `prefetch`
        const long half = width / 2, table = row % tokens * half;
        const real *d = dout + row * token(), *y = out + row * token();
        prefetch(d + AHEAD * token(), token());
        prefetch(y + AHEAD * token(), token());
        if (gates) prefetch(embedding + (row + AHEAD) * n_kv_head * width, n_kv_head * width);
        for (long head = 0; head < rotated(); head++, d += width, y += width, to += width) {
            float factor = 1, along = 0;
            if (inverse) {
                vec products{};
                vectors(width, [&](long i, auto n) { products += load_part(d + i, n) * load_part(y + i, n); });
                factor = inverse[row * rotated() + head];
                along = sum_of(products) / width * factor;
            }
            vectors(width, [&](long i, auto n) {
                vec g = load_part(d + i, n);
                if (inverse) g = g * factor - load_part(y + i, n) * along;
                store_part(turned + i, g, n);
            });
            if (cos)
                vectors(half, [&](long i, auto n) {
                    const vec c = load_part(cos + table + i, n), si = load_part(sin + table + i, n);
                    const vec first = load_part(turned + i, n), second = load_part(turned + half + i, n);
                    store_part(to + i, first * c - second * si, n);
                    store_part(to + half + i, first * si + second * c, n);
                });
            else
                vectors(width, [&](long i, auto n) { store_part(to + i, load_part(turned + i, n), n); });
        }
        for (long kv = 0; kv < n_kv_head; kv++, d += width, to += width) {
            const long other = row * n_kv_head + kv;
            const float share = gates ? sigmoid(wide(gates[other])) : 0;
            vec products{};
            vectors(width, [&](long i, auto n) {
                const vec g = load_part(d + i, n);
                store_part(to + i, g, n);
                if (gates) {
                    products += g * load_part(embedding + other * width + i, n);
                    store_part(dembedding + other * width + i, g * (2 * share), n);
                }
            });
            if (gates) store_part(dgates + other, all(sum_of(products) * 2 * share * (1 - share)), 1);
        }
    }
};

}  // namespace
