// One token for each of several rows through a whole GPT, on a CPU: what model/decoder.py computes with PyTorch.
//
// A token reads every weight once and multiplies it with a row or a few, so memory bandwidth bounds it. Weights are
// float32 or bfloat16, and everything else is float32. A thread computes whole outputs, each in a fixed order: the bits
// of a row depend neither on the number of threads nor on the other rows.

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

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
    long n_layer, n_head, n_kv_head, width, channels, columns, bfloat16, activation;  // 0: relu2, 1: gelu, 2: its tanh
    const float *embedding, *positions, *cos, *sin;  // positions or cos and sin may be null; cos, sin: (seq_len, width)
    Norm embedding_norm, final_norm;
    Linear head;
};
}

namespace {

typedef uint16_t half_vec __attribute__((vector_size(W * sizeof(uint16_t))));
typedef uint32_t wide_bits __attribute__((vector_size(W * sizeof(uint32_t))));

inline vec load_weight(const float* from) { return load(from); }

inline vec load_weight(const uint16_t* from) {  // bfloat16 is the upper half of a float32
    half_vec v;
    std::memcpy(&v, from, sizeof v);
    return (vec)(__builtin_convertvector(v, wide_bits) << 16);
}

inline float one_weight(const float* from) { return *from; }

inline float one_weight(const uint16_t* from) {
    const uint32_t bits = (uint32_t)*from << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float sum(vec v) {
    float total = 0;
    for (int i = 0; i < W; ++i) total += v[i];
    return total;
}

// The dot products of one row of weights with N rows of x, which lie `inputs` apart.
template <int N, class T>
inline void dots(const T* weight, const float* x, long inputs, float* result) {
    vec even[N] = {}, odd[N] = {};
    long i = 0;
    for (; i + 2 * W <= inputs; i += 2 * W) {
        const vec a = load_weight(weight + i), b = load_weight(weight + i + W);
        for (int n = 0; n < N; ++n) {
            even[n] += a * load(x + n * inputs + i);
            odd[n] += b * load(x + n * inputs + i + W);
        }
    }
    for (int n = 0; n < N; ++n) {
        result[n] = sum(even[n] + odd[n]);
        for (long k = i; k < inputs; ++k) result[n] += one_weight(weight + k) * x[n * inputs + k];
    }
}

// store(row, output, value) for this thread's share of the outputs of each row of x (rows, inputs).
template <class T, class Store>
void linear(const Linear& l, const float* x, long rows, Store store) {
    const long threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const T* weights = static_cast<const T*>(l.weight);
    for (long o = l.outputs * thread / threads; o < l.outputs * (thread + 1) / threads; ++o) {
        float found[4];
        for (long row = 0; row < rows;) {
            const bool four = row + 4 <= rows;
            if (four)
                dots<4>(weights + o * l.inputs, x + row * l.inputs, l.inputs, found);
            else
                dots<1>(weights + o * l.inputs, x + row * l.inputs, l.inputs, found);
            for (long n = 0; n < (four ? 4 : 1); ++n, ++row) store(row, o, found[n] + (l.bias ? l.bias[o] : 0));
        }
    }
}

void normalize(const Norm& norm, const float* x, float* y, long n) {
    if (norm.kind == 0) {
        std::copy(x, x + n, y);
        return;
    }
    double mean = 0, square = 0;
    for (long i = 0; norm.kind == 2 && i < n; ++i) mean += x[i] / n;
    for (long i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1 / std::sqrt(square / n + norm.eps), center = mean;
    for (long i = 0; i < n; ++i) {
        y[i] = (x[i] - center) * factor;
        if (norm.weight) y[i] = y[i] * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
    }
}

// A query or key head, rotated by its position and normalized.
void place(const Model& m, const Layer& layer, const float* from, long position, float* to) {
    std::vector<float> turned(from, from + m.width);
    const long half = m.width / 2;
    for (long i = 0; m.cos && i < m.width; ++i) {
        const long at = position * m.width + i;
        turned[i] = from[i] * m.cos[at] + from[i < half ? i + half : i - half] * m.sin[at];
    }
    normalize(layer.head_norm, turned.data(), to, m.width);
}

float activated(long kind, float x) {
    if (kind == 0) return x > 0 ? x * x : 0;
    if (kind == 1) return x * 0.5f * (1 + std::erf(x * 0.70710678f));
    return 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

// One key-value head of one row: its key and value into the cache, and its queries over the columns from `first` on.
void attend(const Model& m, const Layer& layer, long rows, long row, long group, long token, long position, long first,
            long column, const float* heads, float* y) {
    const long plane = m.columns * m.width, queries = m.n_head / m.n_kv_head;
    float* keys = layer.cache + (row * m.n_kv_head + group) * plane;
    float* values = keys + rows * m.n_kv_head * plane;
    place(m, layer, heads + (m.n_head + group) * m.width, position, keys + column * m.width);
    const float* value = heads + (m.n_head + m.n_kv_head + group) * m.width;
    const float gate = layer.values ? 2 / (1 + std::exp(-heads[(m.n_head + 2 * m.n_kv_head) * m.width + group])) : 0;
    for (long i = 0; i < m.width; ++i) {
        const float more = layer.values ? gate * layer.values[(token * m.n_kv_head + group) * m.width + i] : 0;
        values[column * m.width + i] = value[i] + more;
    }
    const long start = std::max(first, column + 1 - layer.window), count = column + 1 - start;
    std::vector<float> query(m.width), weights(round_up(count, W), -INFINITY);
    for (long h = group * queries; h < (group + 1) * queries; ++h) {
        place(m, layer, heads + h * m.width, position, query.data());
        float highest = -INFINITY, total = 0;
        for (long s = 0; s < count; ++s) {
            dots<1>(keys + (start + s) * m.width, query.data(), m.width, &weights[s]);
            weights[s] /= std::sqrt((float)m.width);
            highest = std::max(highest, weights[s]);
        }
        for (long s = 0; s < (long)weights.size(); s += W)
            store(&weights[s], exponential(load(&weights[s]) - all(highest)));
        float* to = y + h * m.width;
        std::fill(to, to + m.width, 0.0f);
        for (long s = 0; s < count; ++s) {
            total += weights[s];
            const float* from = values + (start + s) * m.width;
            for (long i = 0; i < m.width; ++i) to[i] += weights[s] * from[i];
        }
        for (long i = 0; i < m.width; ++i) to[i] /= total;
        std::fill(weights.begin() + count, weights.end(), -INFINITY);
    }
}

template <class T>
void step(const Model& m, long rows, const long* tokens, const long* positions, const long* starts, long column,
          float* logits, std::vector<float>& shared) {
    const long c = m.channels, wide = m.layers[0].heads.outputs, hidden = m.layers[0].up.outputs;
    long most = wide;
    for (long l = 0; l < m.n_layer; ++l) most = std::max(most, m.layers[l].heads.outputs);
    float *x = shared.data(), *x0 = x + rows * c, *y = x0 + rows * c, *heads = y + rows * c, *up = heads + rows * most;
    std::vector<float> own(rows * c);  // each thread normalizes for itself: less time than to wait for another
    const auto normalized = [&](const Norm& norm) {
        for (long row = 0; row < rows; ++row) normalize(norm, x + row * c, &own[row * c], c);
        return own.data();
    };
    const auto mixed = [&](const Layer& layer, long at) { return layer.lambda * x[at] + layer.x0_lambda * x0[at]; };
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
        linear<T>(layer.heads, own.data(), rows,
                  [&](long row, long o, float value) { heads[row * n_heads + o] = value; });
#pragma omp barrier
#pragma omp for
        for (long task = 0; task < rows * m.n_kv_head; ++task) {
            const long row = task / m.n_kv_head;
            attend(m, layer, rows, row, task % m.n_kv_head, tokens[row], positions[row], starts[row], column,
                   heads + row * n_heads, y + row * c);
        }
        linear<T>(layer.out, y, rows, [&](long row, long o, float value) {
            x[row * c + o] = mixed(layer, row * c + o) + layer.scale * value;
        });
#pragma omp barrier
        linear<T>(layer.up, normalized(layer.mlp_norm), rows,
                  [&](long row, long o, float value) { up[row * hidden + o] = activated(m.activation, value); });
#pragma omp barrier
        linear<T>(layer.down, up, rows, [&](long row, long o, float value) { x[row * c + o] += value; });
#pragma omp barrier
    }
    linear<T>(m.head, normalized(m.final_norm), rows,
              [&](long row, long o, float value) { logits[row * m.head.outputs + o] = value; });
}

}  // namespace

// tokens, positions, starts: (rows,), the first column of each row. Writes `column` of every cache and logits (rows,
// head.outputs), before a softcap.
extern "C" void decode_step(const Model* model, long rows, const long* tokens, const long* positions,
                            const long* starts, long column, float* logits, int threads) {
    long most = 0;
    for (long l = 0; l < model->n_layer; ++l) most = std::max(most, model->layers[l].heads.outputs);
    std::vector<float> shared(rows * (3 * model->channels + most + model->layers[0].up.outputs));
#pragma omp parallel num_threads(threads)
    if (model->bfloat16)
        step<uint16_t>(*model, rows, tokens, positions, starts, column, logits, shared);
    else
        step<float>(*model, rows, tokens, positions, starts, column, logits, shared);
}
