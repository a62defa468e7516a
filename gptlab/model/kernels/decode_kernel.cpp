// One token for each of several rows through a whole GPT, on a CPU: what model/decoder.py computes with PyTorch.
//
// A token reads every weight once and multiplies it with a row or a few, so memory bandwidth bounds it. Weights are
// float32 or bfloat16, and everything else is float32. A thread computes whole outputs, each in a fixed order: the bits
// of a row depend neither on the number of threads nor on the other rows.

#include "scratch.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>

extern "C" {

struct Norm {
    long kind;  // 0: none, 1: RMSNorm, 2: LayerNorm
    float eps;
    const float *weight, *bias;  // of LayerNorm; bias may be null
};

struct Linear {
    const void* weight;  // (outputs, inputs)
    const float* bias;   // null: none
    long outputs, inputs;
};

struct Layer {
    Linear heads, out, up, down;  // heads: queries, keys, values, and the gates' logits where there are values
    Norm attention_norm, mlp_norm, head_norm;
    const float* values;  // (vocabulary, n_kv_head * width); null: none
    float* cache;         // (2, rows, n_kv_head, columns, width)
    long window;
    float lambda, x0_lambda, scale;
};

struct Model {
    const Layer* layers;
    long n_layer, n_head, n_kv_head, width, channels, columns, narrow, activation;  // 0: relu2, 1: gelu, 2: its tanh
    long key_offset;  // 1: a key's slow channels stand in the column of the token after it
    const float *embedding, *positions, *cos, *sin;  // positions or cos and sin may be null; cos, sin: (seq_len, width)
    Norm embedding_norm, final_norm;
    Linear head;
};
}

namespace {

// The dot products of O rows of weights with N rows of x, which both lie `inputs` apart. Each is summed in the same order,
// whatever O and N are. O * N + O + 1 vectors should be no more than the processor has registers.
template <int O, int N, class T>
inline void dots(const T* weight, const float* x, long inputs, float (*result)[N]) {
    vec sums[O][N];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[o][n] = vec{};
    long i = 0;
    for (; i + W <= inputs; i += W) {
        vec weights[O];
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) {
            weights[o] = load(weight + o * inputs + i);
            __builtin_prefetch(weight + (o + 2 * O) * inputs + i);  // while rows are computed, memory would wait
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const vec row = load(x + n * inputs + i);
#pragma GCC unroll 8
            for (int o = 0; o < O; ++o) sums[o][n] += weights[o] * row;
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            result[o][n] = sum_of(sums[o][n]);
            for (long k = i; k < inputs; ++k) result[o][n] += wide(weight[o * inputs + k]) * x[n * inputs + k];
        }
}

// A thread's share of the outputs.
struct Share {
    long first, last;

    explicit Share(long outputs) {
        const long threads = omp_get_num_threads(), thread = omp_get_thread_num();
        first = outputs * thread / threads, last = outputs * (thread + 1) / threads;
    }
};

// O outputs of all rows: their weights are in the fastest cache after the first four rows.
template <int O, class T>
inline void linear_outputs(const Linear& l, const float* x, long rows, long output, float* y) {
    const T* weight = static_cast<const T*>(l.weight) + output * l.inputs;
    const auto rows_at = [&](long row, auto n) {
        float found[O][n];
        dots<O, n>(weight, x + row * l.inputs, l.inputs, found);
        for (long i = 0; i < n; ++i)
            for (int o = 0; o < O; ++o)
                y[(row + i) * l.outputs + output + o] = found[o][i] + (l.bias ? l.bias[output + o] : 0);
    };
    long row = 0;
    for (; row + 4 <= rows; row += 4) rows_at(row, std::integral_constant<int, 4>());
    for (; row < rows; ++row) rows_at(row, std::integral_constant<int, 1>());
}

// y (rows, outputs) = x (rows, inputs) by the weights: this thread's share of each row. It is no part of its callers, which
// would take five times as long to compile (docs/LOG.md, 2026-11-26).
template <class T>
__attribute__((noinline)) void linear_of_type(const Linear& l, const float* x, long rows, float* y) {
    constexpr int O = W == 16 ? 4 : 2;  // with four rows, so many vectors as fit into 32 or 16 registers
    const Share share(l.outputs);
    long output = share.first;
    for (; output + O <= share.last; output += O) linear_outputs<O, T>(l, x, rows, output, y);
    for (; output < share.last; ++output) linear_outputs<1, T>(l, x, rows, output, y);
}

void linear(const Model& m, const Linear& l, const float* x, long rows, float* y) {
    if (m.narrow)
        linear_of_type<bfloat16>(l, x, rows, y);
    else
        linear_of_type<float>(l, x, rows, y);
}

// The sum of term(x[i]) over n elements.
template <class Term>
inline float sum_over(const float* x, long n, Term term) {
    vec sums{};
    float rest = 0;
    long i = 0;
    for (; i + W <= n; i += W) sums += term(load(x + i));
    for (; i < n; ++i) rest += term(all(x[i]))[0];
    return sum_of(sums) + rest;
}

void normalize(const Norm& norm, const float* x, float* y, long n) {
    if (norm.kind == 0) {
        std::copy(x, x + n, y);
        return;
    }
    const float center = norm.kind == 2 ? sum_over(x, n, [](vec v) { return v; }) / n : 0;
    const float square = sum_over(x, n, [&](vec v) { return (v - center) * (v - center); });
    const float factor = 1 / std::sqrt(square / n + norm.eps);
    for (long i = 0; i < n; ++i) {
        y[i] = (x[i] - center) * factor;
        if (norm.weight) y[i] = y[i] * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
    }
}

// A query or key head, rotated by its position and normalized. turned: room for a head.
void place(const Model& m, const Layer& layer, const float* from, long position, float* turned, float* to) {
    const long half = m.width / 2;
    for (long i = 0; m.cos && i < m.width; ++i) {
        const long at = position * m.width + i;
        turned[i] = from[i] * m.cos[at] + from[i < half ? i + half : i - half] * m.sin[at];
    }
    normalize(layer.head_norm, m.cos ? turned : from, to, m.width);
}

float activated(long kind, float x) {
    if (kind == 0) return x <= 0 ? 0 : x * x;  // NaN stays
    if (kind == 1) return x * 0.5f * (1 + std::erf(x * 0.70710678f));
    return 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Numbers that `attend` needs: two heads, and the weights of all columns.
long room_of_head(const Model& m) { return 2 * m.width + round_up(m.columns, W); }

// One key-value head of one row: its key and value into the cache, and its queries over the columns from `first` on. room:
// for room_of_head numbers.
void attend(const Model& m, const Layer& layer, long rows, long row, long group, long token, long position, long first,
            long column, const float* heads, float* y, float* room) {
    float *turned = room, *placed = turned + m.width, *weights = placed + m.width;
    const long plane = m.columns * m.width, queries = m.n_head / m.n_kv_head;
    float* keys = layer.cache + (row * m.n_kv_head + group) * plane;
    float* values = keys + rows * m.n_kv_head * plane;
    place(m, layer, heads + (m.n_head + group) * m.width, position, turned, placed);
    const long half = std::max(1L, m.width / 2);
    for (long i = 0; i < m.width; ++i) {
        const bool is_slow = m.key_offset && i % half * 2 >= half;  // slow_channels of model/attention.py
        keys[(column + is_slow) * m.width + i] = placed[i];
    }
    const float* value = heads + (m.n_head + m.n_kv_head + group) * m.width;
    const float gate = layer.values ? 2 / (1 + std::exp(-heads[(m.n_head + 2 * m.n_kv_head) * m.width + group])) : 0;
    for (long i = 0; i < m.width; ++i) {
        const float more = layer.values ? gate * layer.values[(token * m.n_kv_head + group) * m.width + i] : 0;
        values[column * m.width + i] = value[i] + more;
    }
    const long start = std::max(first, column + 1 - layer.window), count = column + 1 - start;
    const float root = std::sqrt((float)m.width);
    float score[4][1];
    for (long h = group * queries; h < (group + 1) * queries; ++h) {
        place(m, layer, heads + h * m.width, position, turned, placed);
        float highest = -INFINITY, total = 0;
        long s = 0;
        for (; s + 4 <= count; s += 4) {
            dots<4>(keys + (start + s) * m.width, placed, m.width, score);
            for (int i = 0; i < 4; ++i) weights[s + i] = score[i][0] / root;
        }
        for (; s < count; ++s) {
            dots<1>(keys + (start + s) * m.width, placed, m.width, score);
            weights[s] = score[0][0] / root;
        }
        for (s = 0; s < count; ++s) highest = std::max(highest, weights[s]);
        for (s = 0; s < count; s += W)
            store(weights + s, exponential(load_part(weights + s, count - s) - all(highest)));
        float* to = y + h * m.width;
        std::fill(to, to + m.width, 0.0f);
        for (s = 0; s < count; ++s) {
            total += weights[s];
            const float* from = values + (start + s) * m.width;
            for (long i = 0; i < m.width; ++i) to[i] += weights[s] * from[i];
        }
        for (long i = 0; i < m.width; ++i) to[i] /= total;
    }
}

void step(const Model& m, long rows, const long* tokens, const long* positions, const long* starts, long column,
          float* logits, float* shared, float* own, long most) {
    const long c = m.channels, hidden = m.layers[0].up.outputs;
    float *x = shared, *x0 = x + rows * c, *y = x0 + rows * c, *change = y + rows * c, *heads = change + rows * c;
    float* up = heads + rows * most;
    // Each thread normalizes for itself, into `own`: less time than to wait for another.
    const auto normalized = [&](const Norm& norm) {
        for (long row = 0; row < rows; ++row) normalize(norm, x + row * c, &own[row * c], c);
        return own;
    };
    const auto mixed = [&](const Layer& layer, long at) { return layer.lambda * x[at] + layer.x0_lambda * x0[at]; };
    // use(i) for each of this thread's elements of (rows, outputs).
    const auto for_own = [&](long outputs, auto use) {
        const Share share(outputs);
        for (long row = 0; row < rows; ++row)
            for (long o = share.first; o < share.last; ++o) use(row * outputs + o);
    };
#pragma omp for
    for (long row = 0; row < rows; ++row) {
        for (long i = 0; i < c; ++i) {
            const float position = m.positions ? m.positions[positions[row] * c + i] : 0;
            y[row * c + i] = m.embedding[tokens[row] * c + i] + position;
        }
        normalize(m.embedding_norm, y + row * c, x0 + row * c, c);
        std::copy(x0 + row * c, x0 + (row + 1) * c, x + row * c);
    }
    for (long l = 0; l < m.n_layer; ++l) {
        const Layer& layer = m.layers[l];
        const long n_heads = layer.heads.outputs;
        for (long at = 0; at < rows * c; ++at) own[at] = mixed(layer, at);
        for (long row = 0; row < rows; ++row) normalize(layer.attention_norm, &own[row * c], &own[row * c], c);
        linear(m, layer.heads, own, rows, heads);
#pragma omp barrier
#pragma omp for
        for (long task = 0; task < rows * m.n_kv_head; ++task) {
            const long row = task / m.n_kv_head;
            attend(m, layer, rows, row, task % m.n_kv_head, tokens[row], positions[row], starts[row], column,
                   heads + row * n_heads, y + row * c, own + rows * c);
        }
        linear(m, layer.out, y, rows, change);
        for_own(c, [&](long i) { x[i] = mixed(layer, i) + layer.scale * change[i]; });
#pragma omp barrier
        linear(m, layer.up, normalized(layer.mlp_norm), rows, up);
        for_own(hidden, [&](long i) { up[i] = activated(m.activation, up[i]); });
#pragma omp barrier
        linear(m, layer.down, up, rows, change);
        for_own(c, [&](long i) { x[i] += change[i]; });
#pragma omp barrier
    }
    linear(m, m.head, normalized(m.final_norm), rows, logits);
}

}  // namespace

// tokens, positions, starts: (rows,), the first column of each row. Writes `column` of every cache and logits (rows,
// head.outputs), before a softcap.
extern "C" void decode_step(const Model* model, long rows, const long* tokens, const long* positions,
                            const long* starts, long column, float* logits, int threads) try {
    long most = 0;
    for (long l = 0; l < model->n_layer; ++l) most = std::max(most, model->layers[l].heads.outputs);
    const auto shared = room<float>(rows * (4 * model->channels + most + model->layers[0].up.outputs));
    const Rooms<float> own(threads, rows * model->channels + room_of_head(*model));
#pragma omp parallel num_threads(threads)
    step(*model, rows, tokens, positions, starts, column, logits, shared.get(), own.own(), most);
} catch (const std::bad_alloc&) { ran_out = true; }
