// The blocks of a GPT, and the functions of their parts.

#pragma once

#include "vectors.h"

#include <functional>

// A block, for block_kernel.cpp. Addresses are null where it lacks what is there. blocks.py has the same fields in the same
// order, and those of its gradients.
struct Block {
    long batch, tokens, width, n_head, n_kv_head, head_width, gate_width, hidden_width, window, key_offset, gelu;
    float of_attention, norm_eps, head_eps;  // head_eps: negative without a norm of heads
    float of_residual, of_x0;
    const float *first_weight, *first_bias, *qkv, *gate, *out, *second_weight, *second_bias, *up, *down;
    const real *x, *x0, *value;  // x0, what goes into the first block: null where it is not added again
    const float *cos, *sin;
    // Kept for the backward pass. `stream` and `stream_in` are the inputs of the two norms.
    real *stream_in, *normed_in, *gates, *heads, *attended, *stream, *normed, *hidden, *slope;
    float *moments_in, *head_factors, *lse, *moments;
    real* y;

    long rows() const { return batch * tokens; }
    bool prepares() const { return gate || cos || head_eps >= 0; }
};

struct Gradients {
    real* dvalue;
    float *first_weight, *first_bias, *qkv, *gate, *out, *second_weight, *second_bias, *up, *down;
    double* factors;  // of_residual's and of_x0's
};

// A linear layer. Rows of x, and of its gradient, are `stride` apart.
struct LinearLayer {
    long rows, inputs, outputs, stride;
};

// (first, from, to) -> the gradients of a layer's results from the row `first` on. Those of the rows `from` to `to` of them
// are there when this returns, and when it has returned in all threads, those of all rows of a slice.
using RowsOf = std::function<const real*(long, long, long)>;

// The gradients of a weight (outputs, inputs), and of x, added to what is there if `add`.
void layer_backward(const LinearLayer& layer, const real* x, const float* weight, const RowsOf& dy_of, float* dweight,
                    real* dx, bool add, int threads);

extern "C" {

void norm_forward(const real* x, const real* y, float a, float b, real* mixed, real* normed, float* inverse, long rows,
                  long width, float eps, long threads);
void norm_backward(const real* dmixed, const real* dnormed, const real* mixed, const float* inverse, const real* x,
                   const real* y, float a, float b, real* dx, real* dy, const real* before, double* sums, long rows,
                   long width, long threads);
void layer_norm_forward(const real* x, const real* y, float a, float b, const float* weight, const float* bias,
                        real* mixed, real* normed, float* moments, long rows, long width, float eps, long threads);
void layer_norm_backward(const real* dmixed, const real* dnormed, const real* mixed, const float* moments,
                         const float* weight, float a, float b, real* dx, real* dy, float* dweight, float* dbias,
                         long rows, long width, long threads);

void heads_forward(long rows, long tokens, long n_head, long n_kv_head, long width, const real* heads, const real* gates,
                   const real* extra, const float* cos, const float* sin, float eps, real* y, float* inverse,
                   long threads);
void heads_backward(long rows, long tokens, long n_head, long n_kv_head, long width, const real* dy, const real* y,
                    const float* inverse, const real* gates, const real* extra, const float* cos, const float* sin,
                    real* dheads, real* dgates, real* dextra, long threads);

void attention_forward(const real* heads, real* y, float* lse, long batch, long tokens, long n_head, long n_kv_head,
                       long width, long window, long key_offset, float dropout, long seed, long threads);
void attention_backward(const real* heads, const real* y, const float* lse, const real* dy, real* dheads,
                        long batch, long tokens, long n_head, long n_kv_head, long width, long window, long key_offset,
                        float dropout, long seed, long threads);

void linear_forward(const real* x, const float* weight, real* y, long rows, long inputs, long outputs, long threads);
void linear_backward(const real* x, const float* weight, const real* dy, real* dx, float* dweight, long rows,
                     long inputs, long outputs, long threads);

void mlp_forward(const real* x, const float* up, const float* down, const real* residual, real* hidden, real* slope,
                 real* y, long rows, long width, long hidden_width, long gelu, long threads);
void mlp_backward(const real* x, const float* up, const float* down, const real* hidden, const real* slope,
                  const real* dy, real* dx, float* dup, float* ddown, long rows, long width, long hidden_width,
                  long threads);

void blocks_forward(const Block* blocks, long count, long threads);
void blocks_backward(const Block* blocks, const Gradients* gradients, long count, const real* dy, real* dx0, long threads);
}
