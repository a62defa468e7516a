// Matrix products on a CPU: a tile that stays in the processor's registers, and how its operands are loaded. Operands are
// `real`, sums float32.
//
// A product takes one `unit` at a time along its depth: a float32 number, or two in bfloat16. Of a matrix that is stored by
// rows, units lie along its rows or down its columns. AMX multiplies bfloat16 only: a float32 number is then the sum of
// TERMS such numbers (terms.h).

#pragma once

#include "vectors.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr bool PAIRS = !std::is_same_v<real, float>;  // numbers are bfloat16

// BY_AMX: whether larger products are computed by registers of matrices. A thread has `Registers` while it multiplies.
// Clang 14, for one, calls GCC's macro __AMXBF16__.
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
constexpr bool BY_AMX = HAS_AMX;

typedef std::conditional_t<PAIRS || BY_AMX, pair, float> unit;
constexpr long PER_UNIT = PAIRS || BY_AMX ? 2 : 1;
constexpr long TERMS = BY_AMX && !PAIRS ? 3 : 1;

inline vec load(const pair* from) { return load(reinterpret_cast<const float*>(from)); }

inline void store(pair* to, vec units) { store(reinterpret_cast<float*>(to), units); }

inline vec all(pair x) { return (vec)(x - wide_bits{}); }

// Has v loaded now, and once: compilers would load it again for each product, and two loads take as long as two products.
inline vec in_register(vec v) {
#ifdef __x86_64__  // elsewhere no product reads memory
    asm("" : "+v"(v));
#endif
    return v;
}

inline vec add_products(vec sum, vec a, vec b, float) { return sum + a * b; }

inline vec add_products(vec sum, vec a, vec b, pair) {
#if defined(__AVX512BF16__)
    // Without `in_register`, GCC 12 moves one of the sums to another register and back in each iteration of the loop.
    a = in_register(a);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    const auto first = [](vec v) { return (vec)((bits)v << 16); };
    const auto second = [](vec v) { return (vec)((bits)v & (int32_t)0xffff0000); };
    return sum + second(a) * second(b) + first(a) * first(b);
#endif
}

// C (M, N vectors) = the sum over k < depth of A(:, k) B(k, :), or what C holds and that sum (ADD). The unit A(i, k) is
// a[i * a_row + k * a_column]. M * N + N + 1 vectors should be no more than the processor has registers, all of which are
// free in a function of its own.
template <int M, int N, bool ADD, class U>
__attribute__((noinline)) void tile(long depth, const U* a, long a_row, long a_column, const U* b, long b_row, float* c,
                                    long c_row) {
    vec sum[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) sum[i][j] = vec{};
    for (long k = 0; k < depth; k++) {
        vec row[N];
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) row[j] = in_register(load(b + k * b_row + j * W));
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const vec x = all(a[i * a_row + k * a_column]);
#pragma GCC unroll 16
            for (int j = 0; j < N; j++) sum[i][j] = add_products(sum[i][j], x, row[j], U());
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) {
            float* to = c + i * c_row + j * W;
            store(to, ADD ? load(to) + sum[i][j] : sum[i][j]);
        }
}

// The first n numbers of a row as halves of pairs, zeros after them; float32 is rounded.
inline half_vec load_halves(const float* from, long n) { return narrow(load_part(from, n)); }

inline half_vec load_halves(const bfloat16* from, long n) {
    half_vec v{};
    if (n >= W)
        std::memcpy(&v, from, sizeof v);
    else
        std::memcpy(&v, from, n * sizeof(bfloat16));
    return v;
}

// Units along a row of numbers, `real` or float32: the first n numbers, zeros after them.
template <class S>
inline vec load_units(const S* from, long n) {
    if constexpr (!PAIRS) return load_part(from, n);
    vec units;
    if constexpr (std::is_same_v<S, bfloat16>)  // as it is: to join halves would take several times as long
        if (n >= 2 * W) {
            std::memcpy(&units, from, sizeof units);
            return units;
        }
    const half_vec halves[2] = {load_halves(from, n), n > W ? load_halves(from + W, n - W) : half_vec{}};
    std::memcpy(&units, halves, sizeof units);
    return units;
}

// Units down columns of numbers, of rows that are `stride` numbers apart: of the first n columns and the first `rows` rows.
template <class S>
inline vec load_units_down(const S* from, long stride, long rows, long n) {
    if constexpr (!PAIRS) return rows > 0 ? load_part(from, n) : vec{};
    return pairs(rows > 0 ? load_halves(from, n) : half_vec{}, rows > 1 ? load_halves(from + stride, n) : half_vec{});
}

// square[i]: the ith units along each of W rows, of the first n numbers of the first `rows` rows.
template <class S>
inline void load_transposed(const S* from, long stride, long rows, long n, vec* square) {
    for (long i = 0; i < W; i++) square[i] = i < rows && n > 0 ? load_units(from + i * stride, n) : vec{};
    transpose_vectors(square);
}

// to (W, W) = the transposed of the first n rows of a matrix (W, W), and zeros. Rows are `stride` and `to_stride` apart.
template <class E>
inline void transpose_square(const E* from, long stride, long n, E* to, long to_stride) {
    vec square[W];
    for (long i = 0; i < W; i++) square[i] = i < n ? load(from + i * stride) : vec{};
    transpose_vectors(square);
    for (long i = 0; i < W; i++) store(to + i * to_stride, square[i]);
}

}  // namespace

#if HAS_AMX
#include "amx.h"
#else
namespace {
struct Registers {};
inline bool registers_are_permitted() { return true; }
// Never called: they only have to be declared where `if constexpr` discards a call.
inline void amx_tile(long, const unit*, long, long, const unit*, long, bool, float*, long, const unit* = nullptr,
                     long = 0, long = 1) {}
inline void turn_panels(unit*, long, long, long, long) {}
template <class Part>
void add_outer_products_by_amx(const unit*, const unit*, bool, long, long, long, Part, bool, bool, float*) {}
}  // namespace
#endif
