"""Sampling from a model: prefill once, then one token at a time through the KV cache.

Nothing here affects training: the model is in evaluation mode only while it computes, and draws come from a separate
generator. So a run that samples equals one that does not.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.run import SampleConfig
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.data.tokens.shards import TokenSplit
from gptlab.eval.bits_per_byte import evaluation_mode
from gptlab.model.gpt import GPT
from gptlab.model.kv_cache import KVCache
from gptlab.runtime.hardware.rng import fold_seed
from gptlab.runtime.processes.distributed import Group

PROMPT_CHARACTERS = 64
"""A line or two, so that most of a sample is the model's own."""
WINDOW_TOKENS = 1024
"""Tokens in which a prompt is looked for: room for the rest of a line that begins earlier."""


def generate(
    model: GPT,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    bos_id: int | None = None,
    stop_at_bos: bool = True,
) -> Iterator[int]:
    """Continue `tokens` (at least one) by up to `max_tokens` tokens, each yielded as soon as it is drawn.

    Temperature 0 or top_k 1 is greedy. Draws are made on the CPU from a generator seeded with `seed`, so that devices
    agree as far as their logits do. With a `bos_id`, generation ends when the model begins a new document, unless
    `stop_at_bos` is off; that token is not yielded.

    A text may become longer than the model's seq_len: whenever the context is full, it is cut to its last half and read
    again (after BOS, if it began with BOS, as packed training rows always do). A model that masks documents reads on
    from each BOS that it draws.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    seq_len, device = model.config.seq_len, next(model.parameters()).device
    cache: KVCache | None = None
    tokens = list(tokens)
    fresh, is_changed = tokens, model.is_changed()
    for _ in range(max_tokens):
        if len(tokens) > seq_len:
            cache, fresh = None, last_half(tokens, seq_len, bos_id)
            tokens = list(fresh)
        if cache is None and not is_changed:
            cache = KVCache(model.config, 1, seq_len, device, model.compute_dtype)
        with evaluation_mode(model):
            logits = model(torch.tensor([fresh], device=device), cache=cache)[0, -1].cpu()
        if temperature == 0 or top_k == 1:
            token = int(logits.argmax())
        else:
            probabilities, entries = likeliest(logits, temperature, top_k)
            token = int(entries[pick(probabilities, generator)])
        if stop_at_bos and token == bos_id:
            return
        yield token
        tokens = followed_by(model, tokens, token, bos_id)
        if len(tokens) == 1:
            cache = None
        fresh = tokens if cache is None else [token]


def followed_by(model: GPT, tokens: list[int], token: int, bos_id: int | None) -> list[int]:
    """`tokens` and `token`. Of a model that masks documents only `token`, where it begins another document: as in
    training, nothing before it may be seen, which a mask cannot do beside a cache."""
    begins_document = token == bos_id != tokens[-1] and model.document_mask is not None
    return [token] if begins_document else [*tokens, token]


def likeliest(logits: Tensor, temperature: float, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Of logits (..., V): probabilities (..., K) in float64 at a temperature above 0, the largest first, and their
    tokens (..., K). top_k None: of all tokens, in the order of the vocabulary, because to sort them takes longer than
    all else. UserError for logits without a finite maximum."""
    values = logits.double()
    tokens = torch.arange(values.shape[-1]).expand(values.shape)
    if top_k is not None:
        values, tokens = values.topk(min(top_k, values.shape[-1]))
    highest = values.amax(-1, keepdim=True)
    if not bool(highest.isfinite().all()):
        raise UserError("the model's logits are not finite: it cannot be sampled (use an earlier checkpoint)")
    # Shifted by the largest first, so that a tiny temperature gives 0 and -inf, never inf - inf.
    return ((values - highest) / temperature).softmax(-1), tokens


def pick(probabilities: Tensor, *generators: torch.Generator) -> Tensor:
    """An index of each row of probabilities (..., K), by one uniform number of the row's own generator: the first one
    at which the cumulative sum exceeds it."""
    sums = probabilities.cumsum(-1)
    uniform = torch.cat([torch.rand(1, dtype=sums.dtype, generator=generator) for generator in generators])
    return torch.searchsorted(sums, uniform.view_as(sums[..., :1]) * sums[..., -1:], right=True)[..., 0]


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, *, seed: int = 0, **settings: Any) -> Iterator[str]:
    """Continue a text, piece by piece, without the prompt. Settings are those of `generate`, but the draws depend on
    the seed and the prompt. UserError for a prompt that leaves no token to start from.

    A character whose bytes are spread over several tokens is yielded whole; an incomplete one at the end is dropped.
    Bytes that are not UTF-8 become U+FFFD.
    """
    bos_id, tokens = tokenizer.bos_id, prompt_tokens(tokenizer, prompt)
    drawn = generate(model, tokens, seed=prompt_seed(seed, prompt), bos_id=bos_id, **settings)
    return utf8_pieces(tokenizer.decode_bytes([token]) for token in drawn)


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt after BOS, where there is one. UserError where that leaves no token to start from."""
    tokens = [int(token) for token in tokenizer.encode(prompt)]
    if tokenizer.bos_id is not None:
        tokens.insert(0, tokenizer.bos_id)
    elif not tokens:
        raise UserError("the prompt is empty, and this tokenizer has no BOS to start from: give a --prompt")
    return tokens


def prompt_seed(seed: int, prompt: str) -> int:
    """With one sequence of draws for all prompts, a weak model would continue all of them with the same words."""
    return fold_seed(seed, zlib.crc32(prompt.encode()))


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: SampleConfig,
    *,
    seed: int,
    group: Group,
) -> Sequence[Iterable[str]]:
    """The pieces of each prompt's continuation, while training waits: all set up at once, drawn as they are read or, by
    several processes, `shared`."""
    streams = [
        sample_text(
            model, tokenizer, prompt, max_tokens=settings.max_tokens, temperature=settings.temperature,
            top_k=settings.top_k, seed=seed,
        )
        for prompt in prompts
    ]  # fmt: skip
    return shared(streams, group, timed=True)


def shared(streams: Sequence[Iterable[str]], group: Group, *, timed: bool = False) -> Sequence[Iterable[str]]:
    """The same texts in every process of the group: rank r draws texts r, r+W, ... Alone, they are drawn when read.
    `timed`: see `Group.gather`."""
    if group.size == 1:
        return streams
    texts = [""] * len(streams)
    own = [[number, "".join(streams[number])] for number in range(group.rank, len(streams), group.size)]
    for drawn in group.gather("samples", own, timed=timed):
        for number, text in drawn:
            texts[number] = text
    return [[text] for text in texts]


def last_half(tokens: list[int], seq_len: int, bos_id: int | None) -> list[int]:
    """What a context that is full is cut to."""
    kept = tokens[-max(1, seq_len // 2) :]
    starts_document = bos_id is not None and tokens[0] == bos_id and seq_len > 1
    return [tokens[0], *kept] if starts_document else kept


def utf8_pieces(parts: Iterable[bytes]) -> Iterator[str]:
    """Text of bytes as they come: a character is yielded whole, an incomplete one at the end is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in parts:
        if piece := decoder.decode(part):
            yield piece


def validation_prompts(split: TokenSplit, tokenizer: Tokenizer, count: int) -> tuple[str, ...]:
    """Up to `count` different texts, the same ones every time: beginnings of documents, in validation's order.

    Where there are fewer documents than prompts, or the tokens are one text, they begin at lines spread over it. A
    prompt ends with a line, else with a word, else with a character. Where the text has none, BOS is the prompt.
    """
    found: dict[str, None] = {}
    for start, end, inside in _places(split, count):
        window = split.read(start, min(WINDOW_TOKENS, end - start))
        if tokenizer.bos_id is not None:
            window = window[int(len(window) > 0 and window[0] == tokenizer.bos_id) :]
            ends = np.flatnonzero(window == tokenizer.bos_id)
            window = window[: ends[0]] if len(ends) else window
        text = tokenizer.decode(window)
        if inside:  # not in the middle of a line, or at least of a character
            text = text.partition("\n")[2] or text.lstrip("\N{REPLACEMENT CHARACTER}")
        prompt = _front(text)
        if prompt and "\N{REPLACEMENT CHARACTER}" not in prompt:
            found[prompt] = None
        if len(found) == count:
            break
    return tuple(found) or (("",) if count > 0 and tokenizer.bos_id is not None else ())


def _places(split: TokenSplit, count: int) -> Iterator[tuple[int, int, bool]]:
    """(first token, end of its document, whether it is inside of it), enough of them that some may give no prompt."""
    order = np.argsort(split.content_hashes, kind="stable")[: 4 * count]
    parts = -(-count // max(1, len(order)))
    for per_document in (parts, 4 * parts):
        for part in range(per_document):
            for document in order.tolist():
                start, end = int(split.document_starts[document]), int(split.document_starts[document + 1])
                yield start + (end - start) * part // per_document, end, part > 0


def _front(text: str) -> str:
    """The beginning of `text`, never more than half of it, without white space at its end or empty lines before it."""
    text = text.lstrip("\r\n")
    most = min(PROMPT_CHARACTERS, max(1, len(text) // 2))
    head = text[:most]
    for border in ("\n", " "):
        cut = head.rfind(border)
        if head[: max(0, cut)].strip():
            return head[:cut].rstrip()
    return head.rstrip()
