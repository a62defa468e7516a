// Activations of an MLP with their derivatives, of vectors.

#pragma once

#include "vectors.h"

namespace {

struct Activated {
    vec value, slope;
};

// max(x, 0)^2; NaN stays.
struct Relu2 {
    template <class T>
    static Activated of(vec x) {
        const vec rectified = select(x < vec{}, vec{}, x);
        return {rectified * rectified, rectified * 2.0f};
    }

    // The slope that belongs to a value: twice its root.
    template <class T>
    static vec slope_of(vec value) {
#ifdef __AVX512F__  // an instruction for roots takes 15 cycles, longer than the product and all else together, where
                    // AMX multiplies (docs/LOG.md, 2026-11-28)
        if constexpr (!std::is_same_v<T, float>) {
            constexpr float SMALLEST = 1.17549435e-38f;  // a normal number, so that the root of 0 is 0
            const vec inverse = inverse_square_root(greater(all(SMALLEST), value));
            const vec root = value * inverse;  // to 6e-5 of it; Newton's method makes 5e-9 of that
            return root * (3.0f - root * inverse);
        }
#endif
        return 2.0f * square_root(value);
    }
};

// x P(X <= x), X normal.
struct Gelu {
    template <class T>
    static Activated of(vec x) {
        const vec size = magnitude(x), bell = exponential_of<T>(size * size, -0.5f, 0);
        // The probability beyond |x| is bell times a polynomial of t, fitted to it by weighted least squares: relative
        // error 4e-8 up to |x| = 14, and 4e-7 with float32's rounding. Form: Abramowitz and Stegun, 7.1.26.
        const vec t = 1.0f / (1.0f + 0.295f * size);
        const vec p = polynomial(t, 3.942120286e-2f, -1.834063896e-1f, 2.710169929e-1f, -1.170714846e-1f, 1.662891907e-1f,
                                 8.474472977e-2f, 1.216994054e-1f, 1.172893413e-1f, 1.700702209e-5f);
        const vec beyond = p * bell, below = select(x < vec{}, beyond, 1.0f - beyond);
        return {x * below, below + x * (bell * 0.398942280f)};
    }
};

}  // namespace
