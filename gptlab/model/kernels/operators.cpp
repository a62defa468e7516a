// The kernels as operators of torch, by its stable C++ interface: compiled graphs call them without Python.

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

}  // namespace

STABLE_TORCH_LIBRARY(gptlab, m) {
    m.def("attention_forward(Tensor heads, int n_head, int window) -> (Tensor, Tensor)");
    m.def("attention_backward(Tensor heads, Tensor y, Tensor lse, Tensor dy, int window) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(gptlab, CPU, m) {
    m.impl("attention_forward", TORCH_BOX(&attention_forward_operator));
    m.impl("attention_backward", TORCH_BOX(&attention_backward_operator));
}
