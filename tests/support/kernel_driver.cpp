// Prints what the kernels compute from numbers that every processor makes alike, one a line.

#include "decode_kernel.cpp"

#include <cstdio>
#include <deque>

extern "C" {
long attention_scratch(long tokens, long width);
void attention_forward(const float*, float*, float*, float*, long, long, long, long, long, long, int);
void attention_backward(const float*, const float*, const float*, const float*, float*, float*, long, long, long, long,
                        long, long, int);
}

namespace {

uint32_t state = 1;
std::deque<std::vector<float>> kept;

// n numbers from -size to size, by a linear congruential generator (Numerical Recipes, ranqd1).
float* numbers(long n, float size) {
    kept.emplace_back(n);
    for (float& x : kept.back()) x = size * (((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1);
    return kept.back().data();
}

void print(const float* x, long n) {
    for (long i = 0; i < n; ++i) std::printf("%.9g\n", x[i]);
}

void attention() {
    const long batch = 2, tokens = 150, n_head = 4, n_kv_head = 2, width = 24, window = 70;
    const long inputs = batch * tokens * (n_head + 2 * n_kv_head) * width, outputs = batch * tokens * n_head * width;
    const float *heads = numbers(inputs, 1), *dy = numbers(outputs, 1);
    std::vector<float> y(outputs), lse(batch * n_head * tokens), gradient(inputs);
    std::vector<float> scratch(attention_scratch(tokens, width));
    attention_forward(heads, y.data(), lse.data(), scratch.data(), batch, tokens, n_head, n_kv_head, width, window, 1);
    attention_backward(heads, y.data(), lse.data(), dy, gradient.data(), scratch.data(), batch, tokens, n_head,
                       n_kv_head, width, window, 1);
    print(y.data(), outputs);
    print(gradient.data(), inputs);
}

// Three steps of five rows through two layers, whose widths are no whole vectors.
void decode(bool bfloat16) {
    const long c = 40, width = 20, vocabulary = 70, hidden = 90, columns = 8, rows = 5;
    const auto linear = [&](long outputs, long inputs) {
        const float* weight = numbers(outputs * inputs, 0.3f);
        if (bfloat16) {  // the upper halves of pairs: any bits are weights, but for exponents
            uint16_t* halves = reinterpret_cast<uint16_t*>(numbers(outputs * inputs, 0.3f));
            for (long i = 0; i < outputs * inputs; ++i) {
                uint32_t whole;
                std::memcpy(&whole, weight + i, 4);
                halves[i] = whole >> 16;
            }
            weight = reinterpret_cast<float*>(halves);
        }
        return Linear{weight, numbers(outputs, 0.1f), outputs, inputs};
    };
    Layer layers[2];
    for (Layer& layer : layers)
        layer = {linear(2 * width + 2 * width + 1, c), linear(c, c), linear(hidden, c), linear(c, hidden),
                 {1, 1e-6f, nullptr, nullptr}, {2, 1e-5f, numbers(c, 1), numbers(c, 1)}, {1, 1e-6f, nullptr, nullptr},
                 numbers(vocabulary * width, 1), numbers(2 * rows * columns * width, 1), 2, 0.9f, 0.1f, 0.7f};
    const Model model = {layers, 2, 2, 1, width, c, columns, bfloat16, 0, numbers(vocabulary * c, 1), nullptr,
                         numbers(columns * width, 1), numbers(columns * width, 1), {1, 1e-6f, nullptr, nullptr},
                         {1, 1e-6f, nullptr, nullptr}, linear(vocabulary, c)};
    const long starts[rows] = {0, 0, 1, 2, 0};
    std::vector<float> logits(rows * vocabulary);
    for (long column = 3; column < 6; ++column) {
        long tokens[rows], positions[rows];
        for (long row = 0; row < rows; ++row) tokens[row] = 7 * column + row, positions[row] = column - starts[row];
        decode_step(&model, rows, tokens, positions, starts, column, logits.data(), 1);
        print(logits.data(), rows * vocabulary);
    }
}

}  // namespace

int main() {
    attention();
    decode(false);
    decode(true);
}
