// The kernels as operators of torch, by its stable interface for C++: between a compiled graph and them is no Python.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

using torch::stable::Tensor;

extern "C" {
long attention_scratch(long tokens, long width);
void attention_forward(const float*, float*, float*, float*, long, long, long, long, long, long, int);
void attention_backward(const float*, const float*, const float*, const float*, float*, float*, long, long, long, long,
                        long, long, int);
void linear_forward(const float*, const float*, float*, float*, long, long, long, int);
void linear_backward(const float*, const float*, const float*, float*, float*, long, long, long, int);
long mlp_forward_scratch(long width, long hidden, int threads);
void mlp_forward(const float*, const float*, const float*, float*, float*, float*, long, long, long, long, int);
void mlp_backward(const float*, const float*, const float*, const float*, const float*, float*, float*, float*, float*,
                  long, long, long, long, int);
}

namespace {

float* at(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

template <class... Sizes>
Tensor empty(const Tensor& like, Sizes... sizes) {
    const int64_t shape[] = {static_cast<int64_t>(sizes)...};
    return torch::stable::new_empty(like, {shape, sizeof...(sizes)});
}

int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

std::tuple<Tensor, Tensor> attention_forward_operator(Tensor heads, int64_t n_head, int64_t window) {
    heads = packed(heads);
    const long batch = heads.size(0), tokens = heads.size(1), rows = heads.size(2), width = heads.size(3);
    Tensor y = empty(heads, batch, tokens, n_head, width), lse = empty(heads, batch, n_head, tokens);
    const Tensor scratch = empty(heads, threads(), attention_scratch(tokens, width));
    attention_forward(at(heads), at(y), at(lse), at(scratch), batch, tokens, n_head, (rows - n_head) / 2, width, window,
                      threads());
    return {y, lse};
}

Tensor attention_backward_operator(Tensor heads, Tensor y, Tensor lse, Tensor dy, int64_t window) {
    heads = packed(heads), dy = packed(dy);
    const long batch = heads.size(0), tokens = heads.size(1), rows = heads.size(2), width = heads.size(3);
    const long n_head = y.size(2);
    Tensor dheads = empty(heads, batch, tokens, rows, width);
    const Tensor scratch = empty(heads, threads(), attention_scratch(tokens, width));
    attention_backward(at(heads), at(y), at(lse), at(dy), at(dheads), at(scratch), batch, tokens, n_head,
                       (rows - n_head) / 2, width, window, threads());
    return dheads;
}

Tensor linear_forward_operator(Tensor x, Tensor w) {
    x = packed(x);
    const long tokens = x.size(0), inputs = w.size(1), outputs = w.size(0);
    Tensor y = empty(x, tokens, outputs);
    const Tensor scratch = empty(x, inputs * outputs);
    linear_forward(at(x), at(w), at(y), at(scratch), tokens, inputs, outputs, threads());
    return y;
}

std::tuple<Tensor, Tensor> linear_backward_operator(Tensor x, Tensor w, Tensor dy) {
    x = packed(x), dy = packed(dy);
    const long tokens = x.size(0), inputs = w.size(1), outputs = w.size(0);
    Tensor dx = empty(x, tokens, inputs), dw = empty(x, outputs, inputs);
    linear_backward(at(x), at(w), at(dy), at(dx), at(dw), tokens, inputs, outputs, threads());
    return {dx, dw};
}

std::tuple<Tensor, Tensor> mlp_forward_operator(Tensor x, Tensor up, Tensor out, int64_t activation) {
    x = packed(x);
    const long tokens = x.size(0), width = x.size(1), hidden = up.size(0);
    Tensor y = empty(x, tokens, width), h = empty(x, tokens, hidden);
    const Tensor scratch = empty(x, mlp_forward_scratch(width, hidden, threads()));
    mlp_forward(at(x), at(up), at(out), at(h), at(y), at(scratch), tokens, width, hidden, activation, threads());
    return {y, h};
}

std::tuple<Tensor, Tensor, Tensor> mlp_backward_operator(Tensor x, Tensor up, Tensor out, Tensor h, Tensor dy,
                                                         int64_t activation) {
    x = packed(x), h = packed(h), dy = packed(dy);
    const long tokens = x.size(0), width = x.size(1), hidden = up.size(0);
    Tensor dx = empty(x, tokens, width), dup = empty(x, hidden, width), dout = empty(x, width, hidden);
    const Tensor scratch = empty(x, 2, tokens, hidden);
    mlp_backward(at(x), at(up), at(out), at(h), at(dy), at(dx), at(dup), at(dout), at(scratch), tokens, width, hidden,
                 activation, threads());
    return {dx, dup, dout};
}

}  // namespace

STABLE_TORCH_LIBRARY(gptlab, m) {
    m.def("attention_forward(Tensor heads, int n_head, int window) -> (Tensor, Tensor)");
    m.def("attention_backward(Tensor heads, Tensor y, Tensor lse, Tensor dy, int window) -> Tensor");
    m.def("linear_forward(Tensor x, Tensor w) -> Tensor");
    m.def("linear_backward(Tensor x, Tensor w, Tensor dy) -> (Tensor, Tensor)");
    m.def("mlp_forward(Tensor x, Tensor up, Tensor out, int activation) -> (Tensor, Tensor)");
    m.def(
        "mlp_backward(Tensor x, Tensor up, Tensor out, Tensor h, Tensor dy, int activation)"
        " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(gptlab, CPU, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward_operator));
    m.impl("attention_backward", TORCH_BOX(&attention_backward_operator));
    m.impl("linear_forward", TORCH_BOX(&linear_forward_operator));
    m.impl("linear_backward", TORCH_BOX(&linear_backward_operator));
    m.impl("mlp_forward", TORCH_BOX(&mlp_forward_operator));
    m.impl("mlp_backward", TORCH_BOX(&mlp_backward_operator));
}
