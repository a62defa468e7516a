"""The kernel for rows of embedding tables: against PyTorch's own lookup, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptlab.config.model import ModelConfig
from gptlab.model.gpt import build_model
from gptlab.model.kernels import embedding, ops
from gptlab.runtime.hardware.device import compiler_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not compiler_available(CPU), reason="no C++ compiler here")
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with ops.implementations_kept():
        ops.load_kernels(CPU, torch.float32)
        yield


def rows_and_gradient(
    table: Tensor, tokens: Tensor, dtype: torch.dtype, drows: Tensor, *, by_kernel: bool = True
) -> tuple[Tensor, Tensor]:
    table = table.detach().requires_grad_()
    rows = embedding.look_up(table, tokens, dtype) if by_kernel else F.embedding(tokens, table).to(dtype)
    rows.backward(drows)
    assert table.grad is not None
    return rows.detach(), table.grad


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("entries", "width", "shape"),
    [(4096, 128, (4, 1024)), (50, 37, (3, 70)), (7, 5, (2, 3)), (9, 16, (40,)), (3, 1, (1,)), (4, 8, (0, 5))],
)
def test_rows_and_the_gradient_of_a_table(entries: int, width: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """PyTorch too sums the gradients of an entry in their order, in float32. The last entry never occurs."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(entries, width, generator=generator)
    tokens = torch.randint(entries - 1, shape, generator=generator)
    drows = torch.randn(*shape, width, generator=generator).to(dtype)
    expected = rows_and_gradient(table, tokens, dtype, drows, by_kernel=False)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            for ours, theirs in zip(rows_and_gradient(table, tokens, dtype, drows), expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(threads)


def test_by_hand() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 1.00390625], [5.0, 6.0]])  # 1 + 2^-8 is between two numbers of bfloat16
    drows = torch.tensor([[1, 2], [10, 20], [100, 200]], dtype=torch.bfloat16)
    rows, gradient = rows_and_gradient(table, torch.tensor([1, 0, 1]), torch.bfloat16, drows)
    assert rows.tolist() == [[3.0, 1.0], [1.0, 2.0], [3.0, 1.0]]
    assert gradient.tolist() == [[10.0, 20.0], [101.0, 202.0], [0.0, 0.0]]


def test_tokens_and_gradients_of_other_layouts() -> None:
    table = torch.arange(12.0).view(3, 4).t()
    tokens = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32).t()
    drows = torch.ones(()).expand(2, 2, 3)
    rows, gradient = rows_and_gradient(table, tokens, torch.float32, drows)
    assert torch.equal(rows, F.embedding(tokens, table))
    assert torch.equal(gradient, torch.ones(4, 3))


@pytest.mark.parametrize("token", [-1, 3])
def test_a_token_that_is_no_row_is_refused(token: int) -> None:
    with pytest.raises(IndexError, match=f"token {token} is out of bounds for a table of 3 rows"):
        embedding.look_up(torch.zeros(3, 4), torch.tensor([0, token]), torch.float32)


def test_a_second_derivative_is_an_error() -> None:
    table = torch.ones(3, 4).requires_grad_()
    rows = embedding.look_up(table, torch.tensor([0, 2]), torch.float32)
    (gradient,) = torch.autograd.grad(rows.square().sum(), table, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


NANOCHAT = ModelConfig(n_layer=2, n_embd=64, n_head=2, seq_len=16, vocab_size=50)
NANOGPT = replace(NANOCHAT, position="learned", value_embeddings=False)


@pytest.mark.parametrize(
    ("config", "dtype", "times"),
    [(NANOCHAT, torch.bfloat16, 2), (NANOCHAT, torch.float32, 2), (NANOCHAT, torch.float64, 0), (NANOGPT, TYPES[1], 0)],
    ids=["bfloat16", "float32", "float64", "learned positions"],
)
def test_where_models_look_rows_up(
    config: ModelConfig, dtype: torch.dtype, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens and of one layer's values. The sum of a token's row and a position's is rounded, and neither of them
    before."""
    model, tokens, calls = build_model(config, device=CPU, compute_dtype=dtype, seed=1), torch.arange(16)[None], []
    plain = F.embedding(tokens, model.token_embedding.weight)
    if model.position_embedding is not None:
        plain = plain + model.position_embedding.weight
    plain = plain.to(dtype)
    expected = plain if model.embedding_norm is None else model.embedding_norm(plain)
    by_kernel = embedding.look_up

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return by_kernel(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(embedding, "look_up", counted)
    assert torch.equal(model.embed(tokens), expected)
    model.loss(tokens, tokens)
    assert len(calls) == times + (times > 0)  # embedded twice
