// Prints what the kernels for one type compute from numbers that every processor makes alike, one a line.

#include "decode_kernel.cpp"
#include "parts.h"
#include "products.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <vector>

extern "C" {
int products_are_permitted();
void relu2_forward(const real*, real*, long, long);
void relu2_backward(const real*, const real*, real*, long, long);
void gelu(const real*, real*, real*, long, long);
void head_loss(const real*, const float*, const int64_t*, real*, float*, double*, long, long, long, long, float, long);
void capped_logits(const real*, const float*, float*, long, long, long, float, long);
void losses(const float*, const int64_t*, float*, long, long, long);
void head_nats(const real*, const float*, const int64_t*, float*, long, long, long, float, long);
void softcap_forward(const float*, float*, float, long, long);
void softcap_backward(const float*, const float*, float*, float, long, long);
void dropout(const real*, real*, long, long, float, long, long);
void loss_and_gradient(real*, const int64_t*, long, long, long, float, double*, long);
struct Numbers {
    const float* elements;
    int64_t size;
};
void sum_of_squares(const Numbers*, long, double*, long);
struct Polynomial {
    float a, b, c;
};
struct Matrices {
    float *first, *second, *third;
    int64_t size;
};
struct Weights {
    float* weights;
    const float* updates;
    int64_t size;
};
void orthogonalize(const float*, float*, long, long, long, const Polynomial*, long, float, float, long);
void normuon(float*, float*, long, long, long, float, float, long);
void muon_directions(const Matrices*, long, float, long, long);
void muon_step(const Weights*, long, float, float, long, long);
void look_up(const float*, const int64_t*, real*, long, long, long);
void look_up_backward(const real*, const int64_t*, float*, long, long, long, long);
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

// Elements of an array of either type, whose widths are no whole vectors.
template <class T>
struct Array {
    // By AMX with ones after its end, which have to stay: sanitizers do not see what its instructions store.
    static constexpr long AFTER = HAS_AMX ? 1 << 14 : 0;
    std::vector<T> elements;
    explicit Array(long n) : elements(n + AFTER) {
        for (long i = n; i < n + AFTER; ++i) store_part(&elements[i], all(1.0f), 1);
    }
    Array(long n, float size) : Array(n) {
        const float* from = numbers(n, size);
        for (long i = 0; i < n; ++i) store_part(&elements[i], all(from[i]), 1);
    }
    T* data() { return elements.data(); }
    void print() {
        const auto end = elements.end() - AFTER;
        for (auto i = elements.begin(); i != end; ++i) std::printf("%.9g\n", wide(*i));
        if (std::any_of(end, elements.end(), [](T x) { return wide(x) != 1; })) std::puts("stored after the end");
    }
};

void attention() {
    const long batch = 2, tokens = 150, n_head = 4, n_kv_head = 2, width = 24, window = 40;
    const long inputs = batch * tokens * (n_head + 2 * n_kv_head) * width, outputs = batch * tokens * n_head * width;
    Array<real> heads(inputs, 1), dy(outputs, 1), y(outputs), gradient(inputs);
    std::vector<float> lse(batch * n_head * tokens);
    for (float dropout : {0.0f, 0.3f}) {
        const long key_offset = dropout > 0;
        attention_forward(heads.data(), y.data(), lse.data(), batch, tokens, n_head, n_kv_head, width, window, key_offset,
                          dropout, 1234567890123, 1);
        attention_backward(heads.data(), y.data(), lse.data(), dy.data(), gradient.data(), batch, tokens, n_head, n_kv_head,
                           width, window, key_offset, dropout, 1234567890123, 1);
        y.print(), gradient.print();
    }
}

void fused() {
    const long rows = 70, width = 37, n_head = 2, n_kv_head = 1, heads = 4, head_width = 22;
    Array<real> x(rows * width, 2), y(rows * width, 2), dsum(rows * width, 1), dnormed(rows * width, 1);
    Array<real> sum(rows * width), normed(rows * width), dx(rows * width), dy(rows * width);
    std::vector<float> inverse(rows * (n_head + n_kv_head));
    double sums[2];
    norm_forward(x.data(), y.data(), 0.9f, 0.3f, sum.data(), normed.data(), inverse.data(), rows, width, 1e-6f, 1);
    norm_backward(dsum.data(), dnormed.data(), sum.data(), inverse.data(), x.data(), y.data(), 0.9f, 0.3f, dx.data(),
                  dy.data(), dsum.data(), sums, rows, width, 1);
    for (auto* one : {&sum, &normed, &dx, &dy}) one->print();
    for (double one : sums) std::printf("%.9g\n", one);
    relu2_forward(x.data(), sum.data(), rows * width, 1);
    relu2_backward(x.data(), y.data(), dx.data(), rows * width, 1);
    sum.print(), dx.print();
    gelu(x.data(), sum.data(), dx.data(), rows * width, 1);
    sum.print(), dx.print();
    dropout(x.data(), sum.data(), rows, width, 0.3f, 1234567890123, 1);
    sum.print();
    Array<real> h(rows * heads * head_width, 2), gates(rows, 2), extra(rows * head_width, 2), out(rows * heads * head_width);
    Array<real> dout(rows * heads * head_width, 1), dh(rows * heads * head_width), dgates(rows), dextra(rows * head_width);
    const float *cos = numbers(rows * head_width / 2, 1), *sin = numbers(rows * head_width / 2, 1);
    heads_forward(rows, rows, n_head, n_kv_head, head_width, h.data(), gates.data(), extra.data(), cos, sin, 1e-6f,
                  out.data(), inverse.data(), 1);
    heads_backward(rows, rows, n_head, n_kv_head, head_width, dout.data(), out.data(), inverse.data(),
                   gates.data(), extra.data(), cos, sin, dh.data(), dgates.data(), dextra.data(), 1);
    for (auto* one : {&out, &dh, &dgates, &dextra}) one->print();
    Array<real> logits(rows * width, 5);
    std::vector<int64_t> targets(rows);
    for (long row = 0; row < rows; ++row) targets[row] = row % 31 - 1;
    loss_and_gradient(logits.data(), targets.data(), rows, width, 30, 3, sums, 1);
    std::printf("%.9g\n", sums[0] / rows);
    logits.print();
    Array<real> inputs(rows * head_width, 1), dinputs(rows * head_width);
    std::vector<float> dweight(300 * head_width);
    const float* weight = numbers(300 * head_width, 1);
    head_loss(inputs.data(), weight, targets.data(), dinputs.data(), dweight.data(), sums, rows, head_width, 300, 295,
              3, 1);
    std::printf("%.9g\n", sums[0] / rows);
    dinputs.print();
    std::vector<float> capped(rows * 295);
    capped_logits(inputs.data(), weight, capped.data(), rows, head_width, 295, 3, 1);
    print(capped.data(), rows * 295);
    losses(capped.data(), targets.data(), inverse.data(), rows, 295, 1);
    print(inverse.data(), rows);
    head_nats(inputs.data(), weight, targets.data(), inverse.data(), rows, head_width, 295, 3, 1);
    print(inverse.data(), rows);
    for (float gradient : dweight) std::printf("%.9g\n", gradient);
    Array<float> z(rows * width, 5), dz(rows * width, 1), capped_z(rows * width), dcapped_z(rows * width);
    softcap_forward(z.data(), capped_z.data(), 1.5f, rows * width, 1);
    softcap_backward(z.data(), dz.data(), dcapped_z.data(), 1.5f, rows * width, 1);
    capped_z.print(), dcapped_z.print();
    const float* scale = numbers(width, 1);
    std::vector<float> moments(2 * rows), dscale(2 * width);
    layer_norm_forward(x.data(), dnormed.data(), 0.9f, 0.3f, scale, scale, sum.data(), normed.data(), moments.data(),
                       rows, width, 1e-5f, 1);
    layer_norm_backward(dsum.data(), dnormed.data(), sum.data(), moments.data(), scale, 0.9f, 0.3f, dx.data(),
                        dy.data(), dscale.data(), dscale.data() + width, rows, width, 1);
    for (auto* one : {&sum, &normed, &dx, &dy}) one->print();
    print(dscale.data(), 2 * width);
    std::vector<float> dtable(31 * width);
    for (int64_t& target : targets) target++;  // from 0 to 30
    look_up(numbers(31 * width, 1), targets.data(), sum.data(), rows, width, 1);
    look_up_backward(dsum.data(), targets.data(), dtable.data(), rows, width, 31, 1);
    sum.print(), print(dtable.data(), 31 * width);
    const Numbers arrays[] = {{dtable.data(), 31 * width}, {scale, width}};
    sum_of_squares(arrays, 2, sums, 1);
    std::printf("%.9g\n", sums[0]);
}

// Layers of 37 inputs and 51 outputs or hidden channels.
void layers() {
    const long rows = 70, width = 37, hidden = 51;
    Array<real> x(rows * width, 1), dwide(rows * hidden, 1), dy(rows * width, 1);
    Array<real> wide(rows * hidden), slope(rows * hidden), y(rows * width), dx(rows * width);
    const float *up = numbers(hidden * width, 0.2f), *down = numbers(width * hidden, 0.2f);
    std::vector<float> dup(hidden * width), ddown(width * hidden);
    linear_forward(x.data(), up, wide.data(), rows, width, hidden, 1);
    linear_backward(x.data(), up, dwide.data(), dx.data(), dup.data(), rows, width, hidden, 1);
    wide.print(), dx.print(), print(dup.data(), hidden * width);
    for (long gelu : {0, 1}) {
        mlp_forward(x.data(), up, down, nullptr, wide.data(), slope.data(), y.data(), rows, width, hidden, gelu, 1);
        mlp_backward(x.data(), up, down, wide.data(), gelu ? slope.data() : nullptr, dy.data(), dx.data(), dup.data(),
                     ddown.data(), rows, width, hidden, 1);
        for (auto* one : {&wide, &slope, &y, &dx}) one->print();
        print(dup.data(), hidden * width), print(ddown.data(), width * hidden);
    }
}

// A layer whose gradients' products are as deep as it has rows or outputs.
void layer(long rows, long inputs, long outputs) {
    Array<real> x(rows * inputs, 0.1f), dy(rows * outputs, 0.1f), dx(rows * inputs);
    const float* weight = numbers(outputs * inputs, 0.1f);
    std::vector<float> dweight(outputs * inputs);
    linear_backward(x.data(), weight, dy.data(), dx.data(), dweight.data(), rows, inputs, outputs, 1);
    dx.print(), print(dweight.data(), outputs * inputs);
}

// Two blocks that are gated and rotated, with RMSNorm and their first input again, or that have LayerNorm and GELU. In
// bfloat16 one: what is rounded otherwise in it would shift most numbers of the second.
void blocks(bool gated) {
    const long batch = 2, tokens = 35, rows = batch * tokens, n_head = 2, n_kv_head = 1, head_width = 22, width = 44;
    const long all_heads = 4 * head_width, gate_width = gated ? 32 : 0, hidden = 51;
    std::deque<Array<real>> reals;
    std::deque<std::vector<float>> floats;
    const auto array = [&](long n, bool there = true) { return there ? reals.emplace_back(n).data() : nullptr; };
    const auto gradient = [&](long n, bool there = true) { return there ? floats.emplace_back(n).data() : nullptr; };
    const auto weight = [](long n, bool there = true) { return there ? numbers(n, 0.3f) : nullptr; };
    Array<real> x(rows * width, 1), value(rows * head_width, 1), dy(rows * width, 0.1f), dx0(rows * width);
    const float *cos = weight(tokens * head_width / 2, gated), *sin = weight(tokens * head_width / 2, gated);
    double factors[2][2] = {};
    std::vector<Block> blocks;
    std::vector<Gradients> gradients;
    const long layers = sizeof(real) == 2 ? 1 : 2;
    for (long layer = 0; layer < layers; layer++) {
        const real* from = layer == 0 ? x.data() : blocks[0].y;
        real* mixed = array(rows * width);
        if (!gated) mixed = const_cast<real*>(from);
        blocks.push_back({
            batch, tokens, width, n_head, n_kv_head, head_width, gate_width, hidden, 20, gated, !gated,
            gated ? 0.7f : 1, 1e-6f, gated ? 1e-6f : -1, gated ? 0.9f : 1, gated ? 0.3f : 0,
            weight(width, !gated), weight(width, !gated), weight(all_heads * width), weight(gate_width, gated),
            weight(width * width), weight(width, !gated), weight(width, !gated), weight(hidden * width),
            weight(width * hidden), from, gated ? x.data() : nullptr, gated ? value.data() : nullptr, cos, sin,
            mixed, array(rows * width), array(rows), array(rows * all_heads), array(rows * width), array(rows * width),
            array(rows * width), array(rows * hidden), array(rows * hidden, !gated),
            gradient(2 * rows), gradient(3 * rows), gradient(n_head * rows), gradient(2 * rows), array(rows * width),
        });
        gradients.push_back({
            array(rows * head_width, gated), gradient(width, !gated), gradient(width, !gated), gradient(all_heads * width),
            gradient(gate_width, gated), gradient(width * width), gradient(width, !gated), gradient(width, !gated),
            gradient(hidden * width), gradient(width * hidden), factors[layer],
        });
    }
    blocks_forward(blocks.data(), layers, 1);
    blocks_backward(blocks.data(), gradients.data(), layers, dy.data(), dx0.data(), 1);
    dx0.print();
    for (auto& one : reals) one.print();
    for (auto& one : floats) print(one.data(), one.size());
    for (auto& both : factors)
        for (double factor : both) std::printf("%.9g\n", factor);
}

// Two matrices, whose shorter and longer sides are no whole tiles and units.
void muon(long rows, long columns) {
    const long count = 2, size = count * rows * columns;
    float *means = numbers(size, 1), *gradients = numbers(size, 1), *weights = numbers(size, 1);
    std::vector<float> directions(size), updates(size), moments(count * std::max(rows, columns), 0.1f);
    for (long nesterov : {0, 1}) {
        const Matrices moved = {means, gradients, directions.data(), size};
        muon_directions(&moved, 1, 0.05f, nesterov, 1);
        print(means, size), print(directions.data(), size);
    }
    const Polynomial polynomials[] = {{3.4445f, -4.7750f, 2.0315f}, {1.5f, -0.5f, 0}};
    orthogonalize(directions.data(), updates.data(), count, rows, columns, polynomials, 2, 1, 0, 1);
    print(updates.data(), size);
    normuon(updates.data(), moments.data(), count, rows, columns, 0.9f, 1.5f, 1);
    print(moments.data(), moments.size()), print(updates.data(), size);
    for (long cautious : {0, 1}) {
        const Weights stepped = {weights, updates.data(), size};
        muon_step(&stepped, 1, 0.1f, 0.3f, cautious, 1);
        print(weights, size);
    }
}

// Three steps of five rows through two layers, whose widths are no whole vectors.
void decode(bool narrow) {
    const long c = 40, width = 20, vocabulary = 70, hidden = 90, columns = 8, rows = 5;
    const auto linear = [&](long outputs, long inputs) {
        const float* weight = numbers(outputs * inputs, 0.3f);
        if (narrow) {  // the upper halves of pairs: any bits are weights, but for exponents
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
    const Model model = {layers, 2, 2, 1, width, c, columns, narrow, 0, 1, numbers(vocabulary * c, 1), nullptr,
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
    if (!products_are_permitted()) return 1;
    attention();
    fused();
    layers();
    layer(2100, 5, 20);  // both deeper than what is multiplied at a time
    layer(70, 5, 1100);
    layer(64, 32, 800);  // whole tiles, and then rows that are not
    layer(70, 32, 5);
    layer(40, 140, 150);  // more panels than are multiplied by one at a time
    blocks(true), blocks(false);
    muon(20, 45);
    muon(45, 20);
    muon(13, 13);
    decode(sizeof(real) == 2);
}
