// Building blocks of the kernels on CPUs: float32 vectors as wide as the processor's, which float32 and bfloat16 are
// loaded into.

#pragma once

#if defined(_OPENMP)
#include <omp.h>
#else  // the compiler has none: one thread does what a team would
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(W * sizeof(float))));
typedef int32_t bits __attribute__((vector_size(W * sizeof(int32_t))));

inline vec load(const float* from) {
    vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

typedef uint16_t bfloat16;  // the upper half of a float32
#ifdef REAL
typedef REAL real;  // the type of activations, float or bfloat16, for which the kernels of training are built
#endif
typedef uint16_t half_vec __attribute__((vector_size(W * sizeof(uint16_t))));
typedef uint32_t wide_bits __attribute__((vector_size(W * sizeof(uint32_t))));

inline wide_bits in_low_halves(half_vec v) {
#if defined(__AVX512F__) && !defined(__clang__)  // of the other form GCC 12 makes three instructions
    wide_bits y;
    asm("vpmovzxwd %1, %0" : "=v"(y) : "vm"(v));
    return y;
#else
    return __builtin_convertvector(v, wide_bits);
#endif
}

inline vec widen(half_vec v) { return (vec)(in_low_halves(v) << 16); }

// To the nearest, of two the even one; NaN stays NaN. AVX512-BF16's own instruction makes 0 of what is below 1.2e-38.
inline half_vec narrow(vec v) {
#ifdef __AVX512BF16__
    half_vec y;
    asm("vcvtneps2bf16 %1, %0" : "=v"(y) : "v"(v));
    return y;
#else
    const wide_bits given = (wide_bits)v, rounded = given + (0x7fff + (given >> 16 & 1)), is_nan = (wide_bits)(v != v);
    return __builtin_convertvector(((rounded & ~is_nan) | ((given | 0x400000) & is_nan)) >> 16, half_vec);
#endif
}

inline vec load(const bfloat16* from) {
    half_vec v;
    std::memcpy(&v, from, sizeof v);
    return widen(v);
}

inline void store(bfloat16* to, vec v) {
    const half_vec rounded = narrow(v);
    std::memcpy(to, &rounded, sizeof rounded);
}

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
    const uint32_t shifted = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &shifted, sizeof value);
    return value;
}

// The first n elements, at most a vector, and zeros after them.
inline vec load_part(const float* from, long n) {
    if (n >= W) return load(from);
    vec v{};
    std::memcpy(&v, from, n * sizeof(float));
    return v;
}

inline vec load_part(const bfloat16* from, long n) {
    if (n >= W) return load(from);
    half_vec v{};
    std::memcpy(&v, from, n * sizeof(bfloat16));
    return widen(v);
}

inline void store_part(float* to, vec v, long n) {
    if (n >= W) return store(to, v);
    std::memcpy(to, &v, n * sizeof(float));
}

inline void store_part(bfloat16* to, vec v, long n) {
    if (n >= W) return store(to, v);
    const half_vec rounded = narrow(v);
    std::memcpy(to, &rounded, n * sizeof(bfloat16));
}

// v as an array of T holds it.
template <class T>
inline vec rounded(vec v) {
    if constexpr (!std::is_same_v<T, float>) return widen(narrow(v));
    // Or the compiler would make one operation, which rounds once, of a product and a sum.
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    asm("" : "+m"(v));
#endif
    return v;
}

inline vec all(float x) { return x - vec{}; }

// On x86 this form compiles to one instruction, and with a comparison to a single max or min where it is one.
inline vec select(bits chosen, vec a, vec b) { return chosen ? a : b; }

// v with `other` in the lanes from the nth on.
inline vec first_lanes(vec v, long n, float other) {
    if (n >= W) return v;
    for (long i = n; i < W; i++) v[i] = other;
    return v;
}

inline vec magnitude(vec x) { return (vec)((bits)x & 0x7fffffff); }

// One instruction, since the compiler need not set errno.
inline vec square_root(vec v) {
    for (int i = 0; i < W; i++) v[i] = __builtin_sqrtf(v[i]);
    return v;
}

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

// A polynomial by Horner's rule, the coefficient of the highest power first.
template <class... More>
inline vec polynomial(vec x, float highest, More... more) {
    vec p = all(highest);
    ((p = p * x + more), ...);
    return p;
}

// Instructions of AVX-512, by name: without <immintrin.h>, GCC 12 compiles a source in three quarters of the time
// (docs/LOG.md, 2026-11-29).
#ifdef __AVX512F__
// The greater of two; b where one is NaN.
inline vec greater(vec a, vec b) {
    vec y;
    asm("vmaxps %2, %1, %0" : "=v"(y) : "v"(a), "v"(b));
    return y;
}

inline vec nearest_integer(vec x) {
    vec y;
    asm("vrndscaleps $0, %1, %0" : "=v"(y) : "v"(x));
    return y;
}

// x 2^floor(n)
inline vec times_power_of_two(vec x, vec n) {
    vec y;
    asm("vscalefps %2, %1, %0" : "=v"(y) : "v"(x), "v"(n));
    return y;
}

// 1 / sqrt(x), to 2^-14 of it.
inline vec inverse_square_root(vec x) {
    vec y;
    asm("vrsqrt14ps %1, %0" : "=v"(y) : "v"(x));
    return y;
}
#endif
#ifdef __AVX512DQ__
// x - floor(x)
inline vec fraction(vec x) {
    vec y;
    asm("vreduceps $1, %1, %0" : "=v"(y) : "v"(x));
    return y;
}
#endif

// 2^n, of the low bits of n + 1.5 * 2^23.
inline vec power_of_two(vec shifted) { return (vec)(((bits)shifted << 23) + (127 << 23)); }

// exp(x) for x up to 88, 0 far below 0, NaN for NaN. Polynomial: Cephes, expf.c.
inline vec exponential(vec x) {
#ifdef __AVX512F__
    x = greater(all(-104.0f), x);  // of which exp is 0; NaN, the second one, stays
    const vec n = nearest_integer(x * 1.44269504088896341f);
#else
    const vec lowest = all(-87.33f);
    const bits vanishes = x < lowest;
    x = select(vanishes, lowest, x);
    const vec to_integer = all(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded; the low bits hold it
    const vec shifted = x * 1.44269504088896341f + to_integer, n = shifted - to_integer;
#endif
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n log(2), in two parts
    vec p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f);
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    return times_power_of_two(p, n);
#else
    return select(vanishes, vec{}, p * power_of_two(shifted));  // not a sum of exponents: NaN stays NaN
#endif
}

// 2^x to 4e-6 of it, for what is rounded to bfloat16: for x below 128, 0 below the smallest normal number, NaN for NaN. The
// polynomial, of the fraction after rounding down, is fitted by weighted least squares; it is exact at 0 and 1, since
// processors round differently near them.
inline vec coarse_power_of_two(vec x) {
#ifdef __AVX512DQ__
    const vec r = fraction(x);
#else
    const vec lowest = all(-126.0f);
    const bits vanishes = x < lowest;
    x = select(vanishes, lowest, x);
    const vec to_integer = all(12582912.0f);
    const vec shifted = x - 0.5f + to_integer, r = x - (shifted - to_integer);
#endif
    const vec p = polynomial(r, 1.355574653e-2f, 5.203237013e-2f, 2.413797625e-1f, 6.930321208e-1f, 1.0f);
#ifdef __AVX512DQ__
    return times_power_of_two(p, x);
#else
    return select(vanishes, vec{}, p * power_of_two(shifted));  // not a sum of exponents: NaN stays NaN
#endif
}

// exp(factor x - shift), as exactly as T holds what is made of it.
template <class T>
inline vec exponential_of(vec x, float factor, float shift) {
    if constexpr (std::is_same_v<T, float>) return exponential(x * factor - shift);
    constexpr float LOG2_E = 1.44269504f;
    return coarse_power_of_two(x * (factor * LOG2_E) - shift * LOG2_E);
}

// tanh(x) to 4e-7 of it; from 9 on, where it is 1 - 3e-8, 1. Rational function: Eigen, generic_fast_tanh_float.
inline vec hyperbolic_tangent(vec x) {
    const vec square = x * x, one = all(1);
    const vec p = polynomial(square, -2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                             5.12229709037114e-08f, 1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f);
    const vec q = polynomial(square, 1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                             4.89352518554385e-03f);
    return select(x > 9.0f, one, select(x < -9.0f, -one, x * p / q));
}

// cap tanh(x / cap), as exactly as T holds what is made of it. In bfloat16 it is cap - 2 cap / (1 + exp(2 x / cap)), which
// is the cap from exp(80) on.
template <class T>
inline vec softcapped(vec x, float cap) {
    if constexpr (std::is_same_v<T, float>) return cap * hyperbolic_tangent(x * (1 / cap));
    const vec most = all(40 * cap);
    return cap - 2 * cap / (1.0f + exponential_of<T>(select(x > most, most, x), 2 / cap, 0));
}

// Two numbers in bfloat16, the first in the lower half.
typedef uint32_t pair;

inline vec pairs(half_vec first, half_vec second) {
    return (vec)(in_low_halves(first) | in_low_halves(second) << 16);
}

// Lanes of two vectors by number, those of b counted from W on.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, bits{__VA_ARGS__})
#endif

template <int STEP, int... LANE>
inline vec swapped(vec v, std::integer_sequence<int, LANE...>) {
    return SHUFFLE(v, v, (LANE ^ STEP)...);
}

// Reduces all lanes to one, by a function of two vectors.
template <int STEP = W / 2, class Function>
inline float folded(vec v, Function of) {
    v = of(v, swapped<STEP>(v, std::make_integer_sequence<int, W>()));
    if constexpr (STEP > 1) return folded<STEP / 2>(v, of);
    return v[0];
}

inline float sum_of(vec v) {
    return folded(v, [](vec a, vec b) { return a + b; });
}

inline float highest_of(vec v) {
    return folded(v, [](vec a, vec b) { return select(b > a, b, a); });
}

template <int STEP, bool HIGH, int... LANE>
inline vec exchanged(vec a, vec b, std::integer_sequence<int, LANE...>) {
    return SHUFFLE(a, b, (LANE & STEP ? W + LANE - (HIGH ? 0 : STEP) : LANE + (HIGH ? STEP : 0))...);
}

// The transposed of W x W elements in vectors, by exchanging ever larger corners.
template <int STEP = 1>
inline void transpose_vectors(vec* rows) {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (!(i & STEP)) {
            const vec a = rows[i], b = rows[i + STEP];
            rows[i] = exchanged<STEP, false>(a, b, lanes);
            rows[i + STEP] = exchanged<STEP, true>(a, b, lanes);
        }
    if constexpr (2 * STEP < W) transpose_vectors<2 * STEP>(rows);
}

// The factors of dropout for a row: 0 with the probability `rate`, and otherwise 1 / (1 - rate).
class Dropout {
  public:
    Dropout() = default;  // no factors yet

    Dropout(float rate, uint64_t seed, uint64_t row) : scale(1 / (1 - rate)), lost((int32_t)(rate * (1 << 24))) {
        // SplitMix64 (Steele, Lea and Flood, doi.org/10.1145/2714064.2660195) makes two words of each row.
        uint64_t z = seed + (row + 1) * 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        z ^= z >> 31;
        first = (uint32_t)z, second = (uint32_t)(z >> 32);
        for (int i = 0; i < W; i++) lanes[i] = i;
    }

    // Of a vector of columns. The 32-bit hash is lowbias32 (github.com/skeeto/hash-prospector), with the second word
    // in its middle: with a single word, some of 100,000 rows would share their draws.
    vec factors(long column) const {
        wide_bits x = (lanes + (uint32_t)column) * 0x9e3779b9u + first;
        x = (x ^ x >> 16) * 0x21f0aaadu ^ second;
        x = (x ^ x >> 15) * 0xd35a2d97u;
        x ^= x >> 15;
        return select((bits)(x >> 8) < lost, vec{}, all(scale));
    }

  private:
    float scale;
    int32_t lost;  // of 2^24
    uint32_t first, second;
    wide_bits lanes;
};

// Elements below which waking the other threads takes longer than the work.
constexpr long SMALL = 16384;

// body(i, n) for each vector of `count` elements: those from i on, n of them, which is W but for the last.
template <class Body>
inline void vectors(long count, Body body) {
    long i = 0;
    for (; i + W <= count; i += W) body(i, std::integral_constant<long, W>());
    if (i < count) body(i, count - i);
}

// Elements that are needed some rows further on. A backward pass reads what its forward pass left, long after: from far
// caches, for which the processor's own prefetcher is late. quickstart's blocks take 1.05 times as long backward without it
// (AMX, 480 MiB of third cache; docs/LOG.md, 2026-11-29).
template <class S>
inline void prefetch(const S* from, long count) {
    for (long i = 0; i < count; i += 64 / (long)sizeof(S)) __builtin_prefetch(from + i);
}

inline int team(long elements, int threads) { return elements < SMALL ? 1 : threads; }

}  // namespace
