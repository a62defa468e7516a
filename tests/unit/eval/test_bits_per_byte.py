"""Bits per byte: against a case by hand, against a slow loop, and that looking changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from ranks_in_turn import in_turn
from torch import Tensor, nn

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.recipes.nanogpt import nanogpt_finetune, nanogpt_shakespeare_char_cpu
from gptlab.config.run import RunConfig
from gptlab.eval import bits_per_byte
from gptlab.eval.bits_per_byte import Evaluation, evaluate, nats_by, nats_of, rows_of_pass, token_nats
from gptlab.model.kernels.ops import implementation
from gptlab.runtime.processes.distributed import Group

VOCAB = 11
TOKEN_BYTES = np.array([1, 2, 3, 0, 1, 1, 4, 2, 1, 5, 0], dtype=np.int32)


@dataclass
class FixedRows:
    inputs: np.ndarray
    targets: np.ndarray
    reads: list[int] = field(default_factory=list)

    @property
    def rows_per_epoch(self) -> int:
        return len(self.inputs)

    def read(self, epoch: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.reads.append(len(indices))
        return self.inputs[indices], self.targets[indices]


class Bigram(nn.Module):
    """Logits that depend on the last token only, with dropout that would show if it were on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(2 * torch.randn(VOCAB, VOCAB, generator=generator))
        self.drop = nn.Dropout(dropout)
        self.frozen = nn.Dropout(dropout).eval()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        return self.frozen(self.drop(self.table[tokens]))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("evaluation must not ask the model for its loss")


def random_rows(n_rows: int = 7, seq_len: int = 6, seed: int = 0) -> FixedRows:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (n_rows, seq_len + 1)).astype(np.int32)
    targets = np.where(rng.random((n_rows, seq_len)) < 0.2, -1, tokens[:, 1:]).astype(np.int32)
    return FixedRows(tokens[:, :-1], targets)


def slow_evaluation(table: np.ndarray, rows: FixedRows) -> tuple[float, float, int, int]:
    """The definition, one token at a time in float64."""
    nats, byte_nats, tokens, n_bytes = 0.0, 0.0, 0, 0
    for inputs, targets in zip(rows.inputs, rows.targets, strict=True):
        for context, target in zip(inputs, targets, strict=True):
            if target == -1:
                continue
            scores = np.exp(table[context].astype(np.float64))
            loss = -math.log(scores[target] / scores.sum())
            nats += loss
            tokens += 1
            if TOKEN_BYTES[target] > 0:
                byte_nats += loss
                n_bytes += int(TOKEN_BYTES[target])
    return nats / tokens, byte_nats / (math.log(2) * n_bytes), tokens, n_bytes


def test_case_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 whatever the context; token 3 is special.

    Targets 0, 1, 2, 3 cost 1, 2, 3, 3 bits. Bits per byte: (1 + 2 + 3) bits over 1 + 2 + 1 bytes = 1.5.
    Loss: (1 + 2 + 3 + 3) / 4 bits = 2.25 ln 2 nats. The target at the ignored place costs nothing.
    """
    rows = FixedRows(np.zeros((1, 5), np.int32), np.array([[0, 1, 2, 3, -1]], np.int32))
    log_probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()

    def logits(tokens: Tensor) -> Tensor:
        return log_probabilities.expand(*tokens.shape, 4) + 7.0  # softmax does not see a constant

    result = evaluate(nats_by(logits), rows, np.array([1, 2, 1, 0]), device="cpu", micro_sequences=2)
    assert result.val_bpb == pytest.approx(1.5, abs=1e-6)
    assert result.val_loss == pytest.approx(2.25 * math.log(2), abs=1e-6)
    assert (result.target_tokens, result.target_bytes) == (4, 4)


@pytest.mark.parametrize("micro_sequences", [1, 2, 3, 7, 16])
def test_equals_the_definition_for_every_batch_size(micro_sequences: int) -> None:
    model, rows = Bigram(), random_rows()
    loss, bpb, tokens, n_bytes = slow_evaluation(model.table.detach().numpy(), rows)
    result = evaluate(nats_by(model), rows, TOKEN_BYTES, device="cpu", micro_sequences=micro_sequences)
    # float32 log-softmax is good to about 1e-7 relative a token.
    assert result.val_loss == pytest.approx(loss, rel=1e-6)
    assert result.val_bpb == pytest.approx(bpb, rel=1e-6)
    assert (result.target_tokens, result.target_bytes) == (tokens, n_bytes)


def test_every_pass_has_one_shape() -> None:
    model, rows = Bigram(), random_rows(n_rows=7)
    evaluate(nats_by(model), rows, TOKEN_BYTES, device="cpu", micro_sequences=3)
    assert model.shapes == [(3, 6)] * 3


@pytest.mark.parametrize("elements", [4 * VOCAB, 1])
def test_chunks_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 positions in chunks of 4, or, where a chunk holds less than one, one at a time."""
    logits, targets = torch.randn(18, VOCAB), torch.from_numpy(random_rows(3).targets).long().flatten()
    computing = implementation(logits)
    whole, sizes, real = token_nats(logits, targets), [], computing.losses
    monkeypatch.setattr(bits_per_byte, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(computing, "losses", lambda z, y: sizes.append(len(z)) or real(z, y))
    assert torch.equal(token_nats(logits, targets), whole)
    assert sizes == ([4, 4, 4, 4, 2] if elements > 1 else [1] * 18)


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits, targets = torch.randn(2, 5, VOCAB), torch.randint(0, VOCAB, (2, 5))
    half = logits.bfloat16()
    nats = token_nats(half, targets)
    assert nats.dtype == torch.float32
    assert torch.equal(nats, token_nats(half.float(), targets))


def test_leaves_modes_gradients_and_random_state_as_they_were() -> None:
    model, rows = Bigram(dropout=0.5).train(), random_rows()
    model.frozen.eval()
    state = torch.get_rng_state()
    result = evaluate(nats_by(model), rows, TOKEN_BYTES, device="cpu", micro_sequences=4, module=model)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert model.table.grad is None
    assert result == evaluate(nats_by(Bigram()), rows, TOKEN_BYTES, device="cpu", micro_sequences=4)


def test_mode_is_restored_after_an_error() -> None:
    model = Bigram(dropout=0.5).train()

    def broken(tokens: Tensor) -> Tensor:
        assert not model.training
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(nats_by(broken), random_rows(), TOKEN_BYTES, device="cpu", micro_sequences=4, module=model)
    assert model.training


@pytest.mark.parametrize("target", [-1, 3])
def test_nothing_to_predict_is_a_clear_error(target: int) -> None:
    rows = FixedRows(np.zeros((2, 4), np.int32), np.full((2, 4), target, np.int32))
    with pytest.raises(UserError, match="validation"):
        evaluate(nats_by(Bigram()), rows, TOKEN_BYTES, device="cpu", micro_sequences=2)


def test_a_gpt_gets_the_same_number_for_every_batch_size() -> None:
    """DESIGN.md: validation agrees to 1e-6 whatever the micro-batch (float32 model)."""
    from gptlab.model.gpt import build_model

    config = ModelConfig(n_layer=2, n_embd=32, n_head=2, seq_len=16, vocab_size=VOCAB)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=5)
    with torch.no_grad():  # a fresh model predicts nothing: its head starts at or near zero
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    rows = random_rows(n_rows=13, seq_len=16, seed=2)
    results = [evaluate(nats_of(model), rows, TOKEN_BYTES, device="cpu", micro_sequences=n) for n in (1, 4, 13, 32)]
    for result in results[1:]:
        assert result.val_bpb == pytest.approx(results[0].val_bpb, abs=1e-6)
        assert result.val_loss == pytest.approx(results[0].val_loss, abs=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 50])
def test_ranks_share_the_passes_and_have_the_bits_of_one(size: int) -> None:
    """Forty passes in float64: added up rank by rank, they round otherwise. (A few float32 losses add up exactly.)"""
    model, rows = Bigram().double(), random_rows(n_rows=79)

    def share(group: Group) -> Evaluation:
        return evaluate(nats_by(model), rows, TOKEN_BYTES, device="cpu", micro_sequences=2, group=group)

    assert in_turn(size, share) == share(Group())
    as_many_on_every_rank = -(-40 // size) * size
    assert rows.reads == [2] * (as_many_on_every_rank + 40)


def with_entries(config: RunConfig, entries: int, asked: int | None = None) -> RunConfig:
    known = replace(config.model, vocab_size=entries)
    return replace(config, model=known, eval=replace(config.eval, micro_sequences=asked))


def test_a_cpu_evaluates_more_rows_at_once_than_it_trains() -> None:
    """12 rows of 64 tokens, 65 characters: a pass of 8,192 positions has 128 rows. One row of 1,024 tokens, 50,257
    entries: it has more logits than a pass should have already. A compiled model and a GPU keep the training's rows."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    characters = with_entries(nanogpt_shakespeare_char_cpu(), 65)
    assert rows_of_pass(characters, cpu) == 128
    assert rows_of_pass(with_entries(nanogpt_shakespeare_char_cpu(), 4096), cpu) == 128
    assert rows_of_pass(with_entries(nanogpt_shakespeare_char_cpu(), 8192), cpu) == 64
    assert rows_of_pass(with_entries(nanogpt_finetune(), 50257), cpu) == 1
    assert rows_of_pass(characters, cpu, compiled=True) == rows_of_pass(characters, cuda) == 12
    assert rows_of_pass(with_entries(nanogpt_shakespeare_char_cpu(), 65, asked=3), cpu) == 3
