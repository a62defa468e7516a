"""Continue a text, fast and from its bytes: what `gptlab sample`, a page or a notebook asks of a trained model.

`continue_text` heals the prompt's end (`healing.py`), draws several samples as one batch (`model/decoder.py`), and says
of each token how probable it was. `sampling.py` is the plain way, which training's own samples take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gptlab.config.fields import BelowOne, Limit, NotNegative, Positive, checked_dataclass, require, require_positive
from gptlab.config.load import checked_value, leaf_fields
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.eval.bits_per_byte import evaluation_mode
from gptlab.eval.healing import Covers, cover_prompt
from gptlab.eval.sampling import followed_by, last_half, likeliest, pick, prompt_seed, prompt_tokens, utf8_pieces
from gptlab.model.decoder import Decoder
from gptlab.model.gpt import GPT
from gptlab.runtime.hardware.rng import fold_seed


@checked_dataclass("")
class Drawing:
    """How tokens are drawn: temperature, then top-k, then top-p, then min-p."""

    max_tokens: NotNegative[int] = 128
    """Tokens of a sample, at most."""
    temperature: NotNegative[float] = 1.0
    """0: always the likeliest token (greedy)."""
    top_k: Positive[int] | None = None
    """Draw from the k likeliest tokens (arXiv:1805.04833). None: all."""
    top_p: Annotated[float, Limit(lambda p: 0 < p <= 1, "must be in (0, 1]", 1.0)] = 1.0
    """Draw from the fewest tokens whose probabilities sum to at least p; see `truncated`. 1: all."""
    min_p: BelowOne = 0.0
    """Drop tokens with less than this share of the likeliest one's probability; see `truncated`. 0: none."""
    stop_at_bos: bool = True
    """End a sample where the model begins a new document."""
    heal: bool = True
    """Heal the end of the prompt (`healing.py`)."""

    def __post_init__(self) -> None:
        for name, kind in leaf_fields(Drawing).items():
            checked_value(kind, getattr(self, name), name)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    piece: bytes
    """What it adds to the text; perhaps a part of a character."""
    probability: float
    """As the model has it: at temperature 1, of all tokens."""
    alternatives: tuple[tuple[bytes, float], ...]
    """The likeliest tokens, this one perhaps among them, with their probabilities, as many as were asked for."""


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    drawing: Drawing,
    *,
    samples: int = 1,
    seed: int = 0,
    alternatives: int = 0,
) -> list[Iterator[DrawnToken]]:
    """An iterator for each of `samples` continuations of the prompt, which it does not repeat. It yields every token as
    soon as it is drawn, with its bytes, its probability, and as many `alternatives` with theirs.

    All samples are drawn as one batch: reading one of them draws the others too, which wait for their readers. Sample k
    has draws of its own, which depend on the seed, the prompt and k, and not on the number of samples; the first one's
    are those of `sample_text`. Where the prompt's end is healed, the first item may be several tokens: what the drawn
    cover adds to the prompt, with its probability among the covers. It counts as one token.

    A model that masks documents reads on from each BOS that it draws, as `generate` does.

    A model whose parts were replaced or hooked is read again for each token, and no prompt is healed.

    UserError for a prompt that cannot be encoded, or is empty where there is no BOS, for no samples, and for negative
    numbers.
    """
    require_positive("samples", samples)
    for name, value in (("seed", seed), ("alternatives", alternatives)):
        require(0 <= value < 2**63, name, value, "must not be negative, and below 2^63", 0)
    return _Batch(model, tokenizer, prompt, drawing, samples, seed, alternatives).streams


def text_of(tokens: Iterator[DrawnToken]) -> Iterator[str]:
    """The text of a continuation, piece by piece; see `utf8_pieces`."""
    return utf8_pieces(token.piece for token in tokens)


class _Batch:
    """Samples of one prompt, drawn together."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        prompt: str,
        drawing: Drawing,
        samples: int,
        seed: int,
        alternatives: int,
    ) -> None:
        self._model, self._tokenizer, self._drawing = model, tokenizer, drawing
        self._alternatives, self._is_changed = min(alternatives, model.vocab_size), model.is_changed()
        tokens, own_seed = prompt_tokens(tokenizer, prompt), prompt_seed(seed, prompt)
        self._texts = [list(tokens) for _ in range(samples)]
        self._seeds = [own_seed, *(fold_seed(own_seed, number) for number in range(1, samples))]
        self._generators = [_generator(seed) for seed in self._seeds]
        self._left = [drawing.max_tokens] * samples
        """Tokens that each sample may still get; 0 once it has ended."""
        self._waiting: list[deque[DrawnToken]] = [deque() for _ in range(samples)]
        steps = self._draw()
        self.streams = [self._stream(number, steps) for number in range(samples)]

    def _stream(self, number: int, steps: Iterator[None]) -> Iterator[DrawnToken]:
        waiting, ended = self._waiting[number], object()
        while True:
            while waiting:
                yield waiting.popleft()
            if not self._left[number] or next(steps, ended) is ended:
                return

    def _draw(self) -> Iterator[None]:
        """One token for every sample that has not ended, at a time."""
        if self._drawing.heal and any(self._left) and not self._is_changed:
            covers = cover_prompt(self._model, self._tokenizer, self._texts[0])
            if covers is not None:
                self._draw_covers(covers)
                yield
        decoder = None if self._is_changed else Decoder(self._model, len(self._texts))
        bos_id = self._tokenizer.bos_id
        while rows := [row for row, left in enumerate(self._left) if left]:
            # Off for a changed model: what its parts cache meanwhile must stay usable in training.
            with torch.inference_mode(not self._is_changed):
                logits = self._next_logits(decoder, rows)
            drawn = draw(logits, self._drawing, [self._generators[row] for row in rows])
            probabilities = logits.softmax(-1)
            shares, likely = (found.tolist() for found in probabilities.topk(self._alternatives))
            of_drawn = probabilities.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist()
            bytes_of = self._tokenizer.tokens
            for number, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                self._texts[row] = followed_by(self._model, self._texts[row], token, bos_id)
                if token == bos_id and self._drawing.stop_at_bos:
                    self._left[row] = 0
                    continue
                self._left[row] -= 1
                others = tuple(
                    (bytes_of[one], share) for one, share in zip(likely[number], shares[number], strict=True)
                )
                self._waiting[row].append(DrawnToken(bytes_of[token], of_drawn[number], others))
            yield

    def _draw_covers(self, covers: Covers) -> None:
        # Generators of their own: where the prompt's own tokens are drawn, the sample is what it is without healing.
        generators = [_generator(fold_seed(seed, 0, 0)) for seed in self._seeds]
        drawn = draw(covers.log_weights.expand(len(generators), -1), self._drawing, generators)
        probabilities = covers.log_weights.softmax(0)
        shares, likely = probabilities.topk(min(self._alternatives, len(probabilities)))
        others = tuple(
            (self._added(covers, cover), share) for cover, share in zip(likely.tolist(), shares.tolist(), strict=True)
        )
        for row, cover in enumerate(drawn):
            self._texts[row] = [*covers.kept, *covers.tokens(cover)]
            if added := self._added(covers, cover):
                self._left[row] -= 1
                self._waiting[row].append(DrawnToken(added, float(probabilities[cover]), others))

    def _added(self, covers: Covers, cover: int) -> bytes:
        """What a cover adds to the prompt."""
        return self._tokenizer.decode_bytes(covers.tokens(cover))[len(covers.removed) :]

    def _next_logits(self, decoder: Decoder | None, rows: list[int]) -> Tensor:
        """(rows, V) in float32 or float64 on the CPU, for the samples that have not ended. A full context is cut as
        `generate` cuts it. decoder None: each text is read again for each token."""
        model, seq_len = self._model, self._model.config.seq_len
        unread = [
            row for row in rows if decoder is None or decoder.length(row) in (0, seq_len) or len(self._texts[row]) == 1
        ]
        if decoder is not None and len(unread) < len(rows):
            logits = decoder.step([text[-1] for text in self._texts])
        else:
            dtype = torch.promote_types(model.compute_dtype, torch.float32)
            logits = torch.empty(len(self._texts), model.vocab_size, dtype=dtype)
        same: dict[tuple[int, ...], list[int]] = {}
        for row in unread:
            if len(self._texts[row]) > seq_len:
                self._texts[row] = last_half(self._texts[row], seq_len, self._tokenizer.bos_id)
            same.setdefault(tuple(self._texts[row]), []).append(row)
        with evaluation_mode(model) if same else nullcontext():
            for text, its_rows in same.items():
                if decoder is None:
                    found = model(torch.tensor([text], device=model.head.weight.device))[0, -1]
                else:
                    found = decoder.read(its_rows, text)
                logits[its_rows] = found.to(logits.device)
        return (logits if len(rows) == len(logits) else logits[rows]).cpu()


def draw(logits: Tensor, drawing: Drawing, generators: Sequence[torch.Generator]) -> list[int]:
    """One entry of each row of logits (rows, entries), which are on the CPU, each by its own generator."""
    if drawing.temperature == 0 or drawing.top_k == 1:
        return logits.argmax(-1).tolist()
    sorted_entries = drawing.top_k or (None if drawing.top_p == 1 else logits.shape[-1])
    probabilities, entries = likeliest(logits, drawing.temperature, sorted_entries)
    picks = pick(truncated(probabilities, drawing.top_p, drawing.min_p), *generators)
    return entries.gather(-1, picks[:, None])[:, 0].tolist()


def truncated(probabilities: Tensor, top_p: float, min_p: float) -> Tensor:
    """`probabilities` (..., K) without those that top-p and then min-p drop; they sum to 1 again.

    top_p: keep the fewest whose sum reaches it (nucleus sampling, arXiv:1904.09751); below 1 the largest have to come
    first. min_p: of these, keep those that are at least min_p times the largest (arXiv:2407.01082).
    """
    if top_p == 1 and min_p == 0:
        return probabilities
    dropped = probabilities < min_p * probabilities.amax(-1, keepdim=True)
    if top_p < 1:
        dropped[..., 1:] |= probabilities.cumsum(-1)[..., :-1] >= top_p
    kept = probabilities.masked_fill(dropped, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
