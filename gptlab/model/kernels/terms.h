// Float32 operands of products by AMX, which multiplies numbers in bfloat16: a number is the sum of three of these, its
// terms, which have 8 of its 24 bits each (G. Henry, P. T. P. Tang and A. Heinecke, arXiv:1904.06376). Of the nine products
// of two numbers' terms the three smallest are left out: they are at most 2^-24 of the whole and 2^-28 in the mean, less
// than what float32 rounds off a product. Sums are float32. So nothing of float32 is lost: the library's products are twice
// as far from exact ones, and take 1.1 to 1.5 times as long (docs/LOG.md, 2026-11-30).
//
// Infinity becomes NaN, and numbers below 1e-33 lose bits.
//
// Where products take other operands, there is one term: the number itself.

#pragma once

#include "products.h"

namespace {

// Units of all terms of the numbers in a register, which are not parted.
constexpr long WHOLE = TERMS > 1 ? TERMS * W : 1;

// A unit has a number and the next one, or of terms the one W after it, for which no lanes have to be moved.
constexpr long APART = TERMS > 1 ? W : 1;

inline long units_of(long numbers) {
    const long units = (numbers + PER_UNIT - 1) / PER_UNIT;
    return TERMS > 1 ? round_up(units, W) * TERMS : units;
}

// In so many units, none of which are parted.
inline long numbers_of(long units) { return units / TERMS * PER_UNIT; }

// Of the numbers that the ith unit would have if there were one term: the first, and the unit of each term.
inline long number_at(long i) { return TERMS > 1 ? i / W * W * PER_UNIT + i % W : i * PER_UNIT; }

inline long unit_at(long i, long term) { return TERMS > 1 ? (i / W * TERMS + term) * W + i % W : i; }

// units[t]: pairs of the terms of numbers in two vectors.
inline void split(vec first, vec second, vec* units) {
    for (long t = 0; t < TERMS; t++) {
        const wide_bits low = in_low_halves(narrow(first)), high = in_low_halves(narrow(second)) << 16;
        units[t] = (vec)(low | high);
        first -= (vec)(low << 16), second -= (vec)high;
    }
}

// units[t]: as load_units and load_units_down of products.h, of each term.
template <class S>
inline void load_terms(const S* from, long n, vec* units) {
    if constexpr (TERMS == 1)
        *units = load_units(from, n);
    else
        split(load_part(from, n), n > W ? load_part(from + W, n - W) : vec{}, units);
}

template <class S>
inline void load_terms_down(const S* from, long stride, long rows, long n, vec* units) {
    if constexpr (TERMS == 1)
        *units = load_units_down(from, stride, rows, n);
    else
        split(rows > 0 ? load_part(from, n) : vec{}, rows > W ? load_part(from + W * stride, n) : vec{}, units);
}

// squares[t]: as load_transposed.
template <class S>
inline void load_transposed_terms(const S* from, long stride, long rows, long n, vec (*squares)[W]) {
    for (long i = 0; i < W; i++) {
        vec units[TERMS]{};
        if (i < rows && n > 0) load_terms(from + i * stride, n, units);
        for (long t = 0; t < TERMS; t++) squares[t][i] = units[t];
    }
    for (long t = 0; t < TERMS; t++) transpose_vectors(squares[t]);
}

}  // namespace
