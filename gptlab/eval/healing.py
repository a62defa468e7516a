"""Token healing: what may follow a prompt, given its bytes and not the tokens that it happens to end in.

A prompt ends where its writer stopped. Tokens do not: where ":\\n" is one token, the token ":" tells the model that no
newline follows. P(next bytes | the prompt's bytes) is a sum over the tokenizations of the prompt together with what
follows it. Here the prompt's last tokens are taken back, and their bytes are covered in every way by tokens of which
only the last may go beyond them. These covers are disjoint events, and every text that begins with the prompt's bytes
belongs to one of them; the model gives each its probability. So to draw a cover and to go on from it is exact, given
the tokens that stay. Source: Vieira et al. 2024, "From Language Models over Tokens to Language Models over
Characters", arXiv:2412.03719.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.eval.bits_per_byte import evaluation_mode
from gptlab.eval.sampling import last_half
from gptlab.model.gpt import GPT
from gptlab.model.kv_cache import KVCache

BACK_UP = 4
"""Tokens to take back. Of 20,000 texts cut at a random character, the tokens before the last one, two, three and four
are those of the whole text in 84.9%, 97.2%, 99.7% and all but one in 20,000 (BPE of 4,096 entries; GPT-2's: 90.3%,
99.3%, 99.98%, all): docs/LOG.md, 2026-11-22. Where they are, no likely tokenization is missed."""
TOLERANCE = 1e-3
"""The search ends once all covers that it has not found have at most this share of the probability of those it has.
It bounds the error of every probability, and lies far below what a sample shows."""
MAX_TAILS = 256
"""Beginnings of covers that are looked at, at most: the rest counts as `missed`."""
BATCH_TAILS = 16


@dataclass(frozen=True, slots=True)
class Covers:
    """Cover i is the tokens `tails[of_tail[i]]` and then `last[i]`, after the prompt's tokens that stay."""

    kept: list[int]
    """The prompt's tokens without the last ones."""
    removed: bytes
    """What those stand for. Every cover's bytes begin with it."""
    tails: list[tuple[int, ...]]
    of_tail: Tensor
    """(covers,) int64"""
    last: Tensor
    """(covers,) int64"""
    log_weights: Tensor
    """(covers,) float64: natural logarithm of the probability of a cover's tokens after those that stay."""
    missed: float
    """The covers that were not found have at most this share of the probability of those that were."""

    def tokens(self, index: int) -> list[int]:
        return [*self.tails[int(self.of_tail[index])], int(self.last[index])]


def cover_prompt(model: GPT, tokenizer: Tokenizer, tokens: Sequence[int], back_up: int = BACK_UP) -> Covers | None:
    """The covers of the last `back_up` of a prompt's tokens; the first token (BOS, where there is one) always stays.

    None where the prompt's own tokens are the only cover, as with byte and char tokenizers. Special tokens never take
    part. The model is in evaluation mode meanwhile.
    """
    starting = _Starting(tokenizer.tokens)
    kept, own = list(tokens[: max(1, len(tokens) - back_up)]), tuple(tokens[max(1, len(tokens) - back_up) :])
    if not own or not starting.ambiguous:
        return None
    removed, seq_len = tokenizer.decode_bytes(own), model.config.seq_len
    fits = len(kept) + len(removed) <= seq_len
    context = kept if fits else last_half(kept, seq_len, tokenizer.bos_id)
    most_tokens = seq_len - len(context)  # in a tail
    frontier: dict[tuple[int, ...], float] = {(): 0.0}  # tails to look at, and their log-probabilities
    found: list[tuple[tuple[int, ...], Tensor, Tensor]] = []
    total, missed, seen = -math.inf, math.inf, 0
    # The prompt's own tokens are looked at first: one of the likeliest covers, and sure to be found.
    batch = [own[:n] for n in range(min(len(own), most_tokens + 1))]
    with evaluation_mode(model):
        answers = _NextTokens(model, context)
        while batch and seen < MAX_TAILS and missed > TOLERANCE:
            seen += len(batch)
            for tail, log_probabilities in zip(batch, answers.after(batch), strict=True):
                weight, rest = frontier.pop(tail), removed[len(tokenizer.decode_bytes(tail)) :]
                if len(ends := starting.with_prefix(rest)):
                    weights = weight + log_probabilities[ends]
                    found.append((tail, ends, weights))
                    total = float(np.logaddexp(total, float(weights.logsumexp(0))))
                for token in starting.prefixes_of(rest):
                    frontier[*tail, token] = weight + float(log_probabilities[token])
            missed = sum(math.exp(weight - total) for weight in frontier.values())
            possible = (tail for tail in frontier if len(tail) <= most_tokens)
            batch = heapq.nlargest(BATCH_TAILS, possible, key=frontier.__getitem__)
    if not found:  # no room in the context
        return None
    of_tail = torch.tensor([len(ends) for _, ends, _ in found])
    covers = Covers(
        kept, removed, [tail for tail, _, _ in found], torch.arange(len(found)).repeat_interleave(of_tail),
        torch.cat([ends for _, ends, _ in found]), torch.cat([weights for _, _, weights in found]), missed,
    )  # fmt: skip
    return None if len(covers.last) == 1 and missed == 0 else covers


class _NextTokens:
    """Log-probabilities of the tokens that may follow a context and a few tokens more; the context is read once."""

    def __init__(self, model: GPT, context: list[int]) -> None:
        self._model, self._last = model, context[-1]
        self._device = next(model.parameters()).device
        self._cache = KVCache(model.config, 1, len(context), self._device, model.compute_dtype)
        if len(context) > 1:
            model(torch.tensor([context[:-1]], device=self._device), cache=self._cache)

    def after(self, tails: Sequence[tuple[int, ...]]) -> Tensor:
        """(tails, V) float64 on the CPU. Shorter tails are padded on the right, where no earlier position looks."""
        longest = max(map(len, tails))
        rows = [[self._last, *tail, *[self._last] * (longest - len(tail))] for tail in tails]
        cache = self._cache.repeated(len(rows), longest + 1)
        logits = self._model(torch.tensor(rows, device=self._device), cache=cache)
        ends = torch.tensor([len(tail) for tail in tails], device=self._device)
        return logits[torch.arange(len(tails), device=self._device), ends].cpu().double().log_softmax(-1)


class _Starting:
    """Tokens by the bytes that they begin with. Special tokens have no bytes, and are not among them."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids = {token: number for number, token in enumerate(tokens) if token}
        self._sorted = sorted(self._ids)
        self._sorted_ids = torch.tensor([self._ids[token] for token in self._sorted])
        self.ambiguous = any(after.startswith(token) for token, after in pairwise(self._sorted))
        """Whether a text may be written in tokens in more than one way: whether a token begins with another."""

    def with_prefix(self, prefix: bytes) -> Tensor:
        """(n,) int64: the tokens that begin with `prefix`, which is not empty, itself included."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_right(self._sorted, prefix, lo=first, key=lambda token: token[: len(prefix)])
        return self._sorted_ids[first:last]

    def prefixes_of(self, text: bytes) -> Iterator[int]:
        """The tokens that `text` begins with, shorter than itself."""
        return (self._ids[text[:n]] for n in range(1, len(text)) if text[:n] in self._ids)
