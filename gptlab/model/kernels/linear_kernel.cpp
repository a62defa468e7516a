// Linear layers without bias, and the two of an MLP with what lies between them, in float32 on a CPU, forward and
// backward.
//
// Written for AMD processors with AVX-512, on which MKL multiplies with half as wide vectors: measured against it in
// docs/LOG.md, 2026-11-21. An MLP takes 48 tokens at a time through both of its layers, so that what is between them
// need not leave the cache; backward it makes the activations again from what came before them.
//
// x, dx  (tokens, inputs)      w, dw    (outputs, inputs)      y, dy  (tokens, outputs)
// MLP    up (hidden, width), out (width, hidden); h: what the activation is applied to, (tokens, hidden)
//
// All widths are multiples of W. Every element is summed in one order, in whichever tile it lies and whoever computes
// it: the bits depend neither on the number of threads nor on the other tokens.

#include "vectors.h"

#include <omp.h>

#include <algorithm>

namespace {

// Rows and vectors of a tile.
#if defined(__AVX512F__)
constexpr int MR = 6, NV = 4;
#else
constexpr int MR = 6, NV = 2;
#endif
constexpr long ROWS = 8 * MR;      // tokens that are taken through an MLP at a time
constexpr long PANEL = NV * W;     // columns whose part of the right factor is in the cache while rows pass by
constexpr long DEPTH = 256;        // products that are summed before they are added to the others
constexpr long OUTPUTS = 96;       // rows of a weight's gradient in one task
constexpr long STAGE = 3 * DEPTH;  // tokens that all tasks take in before any takes more, from the cache

// A factor of a product: the element (i, k) is at[i * row + k * column].
struct Factor {
    const float* at;
    long row, column;
    Factor from(long i, long k) const { return {at + i * row + k * column, row, column}; }
};

inline Factor plain(const float* at, long width) { return {at, width, 1}; }
inline Factor transposed(const float* at, long width) { return {at, 1, width}; }

template <int N, bool ADD>
void panel(long rows, long depth, Factor a, const float* b, long b_row, float* c, long c_row) {
    long r = 0;
    for (; r + MR <= rows; r += MR)
        tile<MR, N, ADD>(depth, a.from(r, 0).at, a.row, a.column, b, b_row, c + r * c_row, c_row);
    for (; r < rows; r++) tile<1, N, ADD>(depth, a.from(r, 0).at, a.row, a.column, b, b_row, c + r * c_row, c_row);
}

template <bool ADD>
void panels(long rows, long columns, long depth, Factor a, const float* b, long b_row, float* c, long c_row) {
    long n = 0;
    for (; n + PANEL <= columns; n += PANEL) panel<NV, ADD>(rows, depth, a, b + n, b_row, c + n, c_row);
    for (; n < columns; n += W) panel<1, ADD>(rows, depth, a, b + n, b_row, c + n, c_row);
}

// c (rows, columns) = a (rows, depth) b (depth, columns), or c and that (`more`).
void product(long rows, long columns, long depth, Factor a, const float* b, long b_row, float* c, long c_row,
             bool more = false) {
    for (long k = 0; k < depth; k += DEPTH) {
        const auto of = k == 0 && !more ? panels<false> : panels<true>;
        of(rows, columns, std::min(DEPTH, depth - k), a.from(0, k), b + k * b_row, b_row, c, c_row);
    }
}

// Rows [r, r + W) of `from` (rows, columns) -> columns of `to` (columns, rows).
void transpose(const float* from, long rows, long columns, long r, float* to) {
    for (long c = 0; c < columns; c += W) {
        vec square[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) square[i] = load(from + (r + i) * columns + c);
        transpose_vectors(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + (c + i) * rows + r, square[i]);
    }
}

// The gradient of a weight, dw (outputs, inputs) = dy^T x, in tasks of OUTPUTS rows and PANEL columns.
struct WeightGradient {
    const float *dy, *x;
    float* dw;
    long tokens, outputs, inputs;
    long high() const { return (outputs + OUTPUTS - 1) / OUTPUTS; }
    long tasks() const { return high() * ((inputs + PANEL - 1) / PANEL); }
    // The task's part of what the tokens of `stage` add. Stages come one after the other.
    void compute(long task, long stage) const {
        const long r = task % high() * OUTPUTS, c = task / high() * PANEL, t = stage * STAGE;
        product(std::min(OUTPUTS, outputs - r), std::min(PANEL, inputs - c), std::min(STAGE, tokens - t),
                transposed(dy + t * outputs + r, outputs), x + t * inputs + c, inputs, dw + r * inputs + c, inputs,
                stage > 0);
    }
};

// An activation of h: its value, and its derivative.

// h times the normal distribution's cumulative function, by Abramowitz and Stegun, 7.1.26 (error 1.5e-7), as torch's
// vectors have it.
struct Gelu {
    static void both(vec h, vec& value, vec& derivative) {
        const vec z = h * 0.70710678118654752f;
        const vec t = 1.0f / (1.0f + 0.3275911f * (vec)((bits)z & 0x7fffffff));
        const vec density = exponential(-z * z);
        vec p = all(1.061405429f);
        p = p * t - 1.453152027f;
        p = p * t + 1.421413741f;
        p = p * t - 0.284496736f;
        p = p * t + 0.254829592f;
        const vec beyond = 0.5f * p * t * density;  // of |h|
        const vec cumulative = select(z < vec{}, beyond, 1.0f - beyond);
        value = h * cumulative;
        derivative = cumulative + h * density * 0.39894228040143268f;
    }
};

// The same by a hyperbolic tangent (arXiv:1606.08415).
struct GeluTanh {
    static void both(vec h, vec& value, vec& derivative) {
        const vec squared = h * h;
        const vec u = 0.79788456080286536f * (h + 0.044715f * squared * h);
        const vec e = exponential(-2.0f * (vec)((bits)u & 0x7fffffff));
        const vec size = (1.0f - e) / (1.0f + e);
        const vec tanh = select(u < vec{}, -size, size);
        const vec slope = 0.79788456080286536f * (1.0f + 3 * 0.044715f * squared);
        value = 0.5f * h * (1.0f + tanh);
        derivative = 0.5f * (1.0f + tanh) + 0.5f * h * (1.0f - tanh * tanh) * slope;
    }
};

struct Relu2 {
    static void both(vec h, vec& value, vec& derivative) {
        const vec positive = select(h <= vec{}, vec{}, h);
        value = positive * positive;
        derivative = 2.0f * positive;
    }
};

template <class Activation>
void forward(const float* x, const float* up, const float* out, float* h, float* y, float* scratch, long tokens,
             long width, long hidden, int threads) {
    float *up_t = scratch, *out_t = scratch + width * hidden, *blocks = scratch + 2 * width * hidden;
#pragma omp parallel num_threads(threads)
    {
        float* a = blocks + omp_get_thread_num() * ROWS * hidden;
#pragma omp for schedule(static) nowait
        for (long r = 0; r < hidden; r += W) transpose(up, hidden, width, r, up_t);
#pragma omp for schedule(static)
        for (long r = 0; r < width; r += W) transpose(out, width, hidden, r, out_t);
#pragma omp for schedule(dynamic)
        for (long t = 0; t < tokens; t += ROWS) {
            const long rows = std::min(ROWS, tokens - t);
            float* before = h + t * hidden;
            product(rows, hidden, width, plain(x + t * width, width), up_t, hidden, before, hidden);
            for (long i = 0; i < rows * hidden; i += W) {
                vec value, derivative;
                Activation::both(load(before + i), value, derivative);
                store(a + i, value);
            }
            product(rows, width, hidden, plain(a, hidden), out_t, width, y + t * width, width);
        }
    }
}

template <class Activation>
void backward(const float* x, const float* up, const float* out, const float* h, const float* dy, float* dx, float* dup,
              float* dout, float* scratch, long tokens, long width, long hidden, int threads) {
    float *dh = scratch, *a = scratch + tokens * hidden;
    const WeightGradient of_up{dh, x, dup, tokens, hidden, width}, of_out{dy, a, dout, tokens, width, hidden};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (long t = 0; t < tokens; t += ROWS) {
            const long rows = std::min(ROWS, tokens - t), begin = t * hidden;
            product(rows, hidden, width, plain(dy + t * width, width), out, hidden, dh + begin, hidden);
            for (long i = begin; i < begin + rows * hidden; i += W) {
                vec value, derivative;
                Activation::both(load(h + i), value, derivative);
                store(a + i, value);
                store(dh + i, load(dh + i) * derivative);
            }
            product(rows, width, hidden, plain(dh + begin, hidden), up, width, dx + t * width, width);
        }
        for (long stage = 0; stage * STAGE < tokens; stage++)
#pragma omp for schedule(dynamic)
            for (long task = 0; task < of_up.tasks() + of_out.tasks(); task++)
                if (task < of_up.tasks())
                    of_up.compute(task, stage);
                else
                    of_out.compute(task - of_up.tasks(), stage);
    }
}

}  // namespace

extern "C" {

// Whether these are for such a processor as they were written for.
int linear_pays() {
#if defined(__AVX512F__) && (defined(__x86_64__) || defined(__i386__))
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}

// Of which number every width has to be a multiple.
long linear_multiple() { return W; }

// scratch: inputs * outputs floats.
void linear_forward(const float* x, const float* w, float* y, float* scratch, long tokens, long inputs, long outputs,
                    int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < outputs; r += W) transpose(w, outputs, inputs, r, scratch);
#pragma omp for schedule(dynamic)
        for (long t = 0; t < tokens; t += ROWS)
            product(std::min(ROWS, tokens - t), outputs, inputs, plain(x + t * inputs, inputs), scratch, outputs,
                    y + t * outputs, outputs);
    }
}

void linear_backward(const float* x, const float* w, const float* dy, float* dx, float* dw, long tokens, long inputs,
                     long outputs, int threads) {
    const WeightGradient of_weight{dy, x, dw, tokens, outputs, inputs};
#pragma omp parallel num_threads(threads)
    for (long stage = 0; stage * STAGE < tokens; stage++) {
        const long begin = stage * STAGE, blocks = (std::min(STAGE, tokens - begin) + ROWS - 1) / ROWS;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < blocks + of_weight.tasks(); task++)
            if (task < blocks) {
                const long t = begin + task * ROWS;
                product(std::min(ROWS, tokens - t), inputs, outputs, plain(dy + t * outputs, outputs), w, inputs,
                        dx + t * inputs, inputs);
            } else {
                of_weight.compute(task - blocks, stage);
            }
    }
}

// Floats of scratch that mlp_forward needs.
long mlp_forward_scratch(long width, long hidden, int threads) { return 2 * width * hidden + threads * ROWS * hidden; }

// activation: 0 gelu, 1 gelu_tanh, 2 relu2.
void mlp_forward(const float* x, const float* up, const float* out, float* h, float* y, float* scratch, long tokens,
                 long width, long hidden, long activation, int threads) {
    const auto of = activation == 0 ? forward<Gelu> : activation == 1 ? forward<GeluTanh> : forward<Relu2>;
    of(x, up, out, h, y, scratch, tokens, width, hidden, threads);
}

// scratch: 2 * tokens * hidden floats.
void mlp_backward(const float* x, const float* up, const float* out, const float* h, const float* dy, float* dx,
                  float* dup, float* dout, float* scratch, long tokens, long width, long hidden, long activation,
                  int threads) {
    const auto of = activation == 0 ? backward<Gelu> : activation == 1 ? backward<GeluTanh> : backward<Relu2>;
    of(x, up, out, h, dy, dx, dup, dout, scratch, tokens, width, hidden, threads);
}
}
