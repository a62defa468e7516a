// The blocks of a GPT on a CPU, forward and backward: the kernels of their parts one after the other, as `Block.forward` has
// them, with the same bits. What PyTorch and Python do between two kernels, which have left them no cache, took up to a fifth
// of quickstart's steps and a quarter of those of small models (docs/LOG.md, 2026-11-29).

#include "heads.h"
#include "layers.h"
#include "parts.h"

namespace {

// LayerNorm where there is a weight, else RMSNorm.
void norm(const Block& s, const real* x, const real* y, float a, float b, const float* weight, const float* bias,
          real* mixed, real* normed, float* moments, long threads) {
    if (weight)
        layer_norm_forward(x, y, a, b, weight, bias, mixed, normed, moments, s.rows(), s.width, s.norm_eps, threads);
    else
        norm_forward(x, y, a, b, mixed, normed, moments, s.rows(), s.width, s.norm_eps, threads);
}

Heads heads_of(const Block& s) { return {s.tokens, s.n_head, s.n_kv_head, s.head_width, s.cos, s.sin, s.head_eps}; }

// The products of queries, keys, values and gates, and what attention takes of them, while some rows are in the cache.
void heads_forward(const Block& s, int threads) {
    const Heads prepared = heads_of(s);
    const long token = prepared.token(), depth = units_of(s.width), panels = panels_of(token);
    const long seen = units_of(s.gate_width), of_gates = s.gate ? panels_of(s.n_kv_head) : 0;
    const auto qkv = room<unit>(panels * depth * NR), gate = room<unit>(of_gates * seen * NR);  // transposed
    const int most = team(s.rows() * token, threads);
    const Rooms<unit> spares(most, HEIGHT * depth);
    const Rooms<real> all_products(most, HEIGHT * token);
    const Rooms<float> all_turned(most, s.head_width);
    Tasks tasks(most);
#pragma omp parallel num_threads(most)
    {
        const long thread = omp_get_thread_num(), n = omp_get_num_threads();
        const Registers registers{};
        unit* spare = spares.own();
        real* products = all_products.own();
        float* turned = all_turned.own();
        pack_transposed(s.qkv, token, s.width, Share(panels, thread, n), qkv.get());
        if (s.gate) pack_transposed(s.gate, s.n_kv_head, s.gate_width, Share(of_gates, thread, n), gate.get());
#pragma omp barrier
        row_blocks(tasks, s.rows(), [&](long row, long height) {
            const real* x = s.normed_in + row * s.width;
            real* gates = s.gate ? s.gates + row * s.n_kv_head : nullptr;
            multiply_rows(x, s.width, height, s.width, qkv.get(), token, spare,
                          into(s.prepares() ? products : s.heads + row * token, token));
            if (!s.prepares()) return;
            if (gates)
                multiply_rows(x, s.width, height, s.gate_width, gate.get(), s.n_kv_head, spare, into(gates, s.n_kv_head));
            for (long r = 0; r < height; r++)
                prepared.prepare(row + r, products + r * token, gates ? gates + r * s.n_kv_head : nullptr, s.value, s.heads,
                                 s.head_factors, turned);
        });
    }
}

// From the gradient of what attention takes: those of the weights, of `value`, and of the normed inputs.
void heads_backward(const Block& s, const real* dheads, const Gradients& g, real* dnormed, int threads) {
    const Heads prepared = heads_of(s);
    const LinearLayer qkv{s.rows(), s.width, prepared.token(), s.width}, gate{s.rows(), s.gate_width, s.n_kv_head, s.width};
    const auto products = room<real>(slice_of(qkv.rows, std::max(qkv.inputs, qkv.outputs), threads) * qkv.outputs);
    const auto gates = room<real>(s.gate ? s.rows() * s.n_kv_head : 0);
    const Rooms<float> all_turned(threads, s.head_width);
    const auto of_products = [&](long first, long from, long to) {
        if (!s.prepares()) return dheads + first * qkv.outputs;
        for (long r = from; r < to; r++)
            prepared.gradient(first + r, dheads, s.heads, s.head_eps < 0 ? nullptr : s.head_factors, s.gates, s.value,
                              products.get() + r * qkv.outputs, gates.get(), g.dvalue, all_turned.own());
        return (const real*)products.get();
    };
    layer_backward(qkv, s.normed_in, s.qkv, of_products, g.qkv, dnormed, false, threads);
    const auto of_gates = [&](long first, long, long) { return gates.get() + first * s.n_kv_head; };
    if (s.gate) layer_backward(gate, s.normed_in, s.gate, of_gates, g.gate, dnormed, true, threads);
}

void forward(const Block& s, long threads) {
    const long rows = s.rows();
    norm(s, s.x, s.x0, s.of_residual, s.of_x0, s.first_weight, s.first_bias, s.stream_in, s.normed_in, s.moments_in,
         threads);
    heads_forward(s, threads);
    attention_forward(s.heads, s.attended, s.lse, s.batch, s.tokens, s.n_head, s.n_kv_head, s.head_width, s.window,
                      s.key_offset, 0, 0, threads);
    real* attention = s.y;  // until the MLP's result takes its place
    ::linear_forward(s.attended, s.out, attention, rows, s.width, s.width, threads);
    norm(s, s.stream_in, attention, 1, s.of_attention, s.second_weight, s.second_bias, s.stream, s.normed, s.moments,
         threads);
    ::mlp_forward(s.normed, s.up, s.down, s.stream, s.hidden, s.slope, s.y, rows, s.width, s.hidden_width, s.gelu, threads);
}

// Gradients of what a backward pass computes on its way.
struct Between {
    Memory<real> normed, stream, attention, heads;

    explicit Between(const Block& s)
        : normed(room<real>(s.rows() * s.width)), stream(room<real>(s.rows() * s.width)),
          attention(room<real>(s.of_attention == 1 ? 0 : s.rows() * s.width)),
          heads(room<real>(s.rows() * heads_of(s).token())) {}
};

// Of two gradients of one tensor, rounded as autograd adds them. to may be one of them.
void add(const real* a, const real* b, long count, real* to, long threads) {
#pragma omp parallel for schedule(static) num_threads(team(count, threads))
    for (long i = 0; i < count; i += W) {
        const long n = std::min<long>(W, count - i);
        store_part(to + i, load_part(a + i, n) + load_part(b + i, n), n);
    }
}

// dx may be dy. dx0, where it is added again: its gradient, added to what is there unless this is the last block. With the
// first block, whose x it is, that is all of it.
void backward(const Block& s, const Gradients& g, const real* dy, real* dx, real* dx0, bool is_first, bool is_last,
              long threads) {
    const long rows = s.rows();
    const Between between(s);
    real *normed = between.normed.get(), *stream = between.stream.get(), *heads = between.heads.get();
    ::mlp_backward(s.normed, s.up, s.down, s.hidden, s.slope, dy, normed, g.up, g.down, rows, s.width, s.hidden_width,
                   threads);
    const bool alike = s.of_attention == 1;
    real* other = alike ? nullptr : between.attention.get();
    if (s.second_weight)
        layer_norm_backward(dy, normed, s.stream, s.moments, s.second_weight, 1, s.of_attention, stream, other,
                            g.second_weight, g.second_bias, rows, s.width, threads);
    else
        norm_backward(dy, normed, s.stream, s.moments, nullptr, nullptr, 1, s.of_attention, stream, other, nullptr, nullptr,
                      rows, s.width, threads);
    real* attended = normed;  // whose values are used up
    ::linear_backward(s.attended, s.out, alike ? stream : other, attended, g.out, rows, s.width, s.width, threads);
    attention_backward(s.heads, s.attended, s.lse, attended, heads, s.batch, s.tokens, s.n_head, s.n_kv_head, s.head_width,
                       s.window, s.key_offset, 0, 0, threads);
    heads_backward(s, heads, g, normed, threads);
    if (s.x0)
        return norm_backward(stream, normed, s.stream_in, s.moments_in, s.x, s.x0, s.of_residual, s.of_x0,
                             is_first ? nullptr : dx, dx0, is_last ? nullptr : dx0, g.factors, rows, s.width, threads);
    const real* added = PAIRS ? nullptr : stream;  // in bfloat16, the norm's gradient is rounded before
    if (s.first_weight)
        layer_norm_backward(added, normed, s.stream_in, s.moments_in, s.first_weight, 1, 0, dx, nullptr, g.first_weight,
                            g.first_bias, rows, s.width, threads);
    else
        norm_backward(added, normed, s.stream_in, s.moments_in, nullptr, nullptr, 1, 0, dx, nullptr, nullptr, nullptr, rows,
                      s.width, threads);
    if (PAIRS) add(dx, stream, rows * s.width, dx, threads);
}

}  // namespace

extern "C" {

void blocks_forward(const Block* blocks, long count, long threads) try {
    for (long i = 0; i < count; i++) forward(blocks[i], threads);
} catch (const std::bad_alloc&) { ran_out = true; }

// dy: of the last block's result.
void blocks_backward(const Block* blocks, const Gradients* gradients, long count, const real* dy, real* dx0,
                     long threads) try {
    const bool again = blocks->x0;  // it is added in each block
    const auto between = room<real>(blocks->rows() * blocks->width);
    for (long i = count - 1; i >= 0; i--) {
        real* dx = i == 0 && !again ? dx0 : between.get();
        backward(blocks[i], gradients[i], dy, dx, again ? dx0 : nullptr, i == 0, i == count - 1, threads);
        dy = dx;
    }
} catch (const std::bad_alloc&) { ran_out = true; }
}
