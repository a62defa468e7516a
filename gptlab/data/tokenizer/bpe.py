"""Byte-level BPE: merges learned by Hugging Face `tokenizers`, applied by `tiktoken`.

Why both give the same ids. Hugging Face merges the adjacent pair whose *merge* was learned first; tiktoken the pair
whose *joined bytes* have the lowest rank. Ids here are the 256 bytes, then one for each merge in the order learned, so
rank and merge order are one order, and the two could differ only if bytes z = p + q, learned from the
pair (p, q), also lay there as another pair (x, y). They never do: when all earlier merges are done and no merge has
crossed the ends of z, the inside of z was merged from the same bytes by the same merges, leftmost first, wherever z
stands; so it is (p, q) everywhere. For the same reason no two merges make the same bytes. The tests compare the ids.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import tiktoken

from gptlab.config.errors import ConfigError, UserError
from gptlab.config.run import TokenizerConfig
from gptlab.data.tokenizer.base import Tokenizer, byte_characters, byte_level, document, utf8

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Console

Merge = tuple[bytes, bytes]

MAX_DIGITS_LIMIT = 1000
"""tiktoken's regex engine compiles \\p{N}{1,1000} and refuses 3000 (its automaton grows with the number)."""

PART_CHARACTERS = 1 << 18
"""Longer documents are encoded in parts of about this size, side by side. 0.25 MB take a thread 15 ms."""

TASK_CHARACTERS = 1 << 16
"""Short texts are handed to the threads together, about this many characters at a time: handing over each of 100,000
documents of 43 characters by itself takes four times the work of encoding it."""

BLANKS = "\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's White_Space without the newlines: what \\s is to the regex engine beside [\\r\\n]."""

PORTION_CHARACTERS = 1 << 11
"""The trainer keeps 90 bytes for each byte of a text in hand, and shares texts, not parts of them, among the cores: one
text of 31.5 MB takes it 18 s and 2.9 GB; in portions, 7 s and 0.3 GB. And each merge moves the rest of its piece: 44
merges of 2 MB of letters without a blank take it 1.8 s in portions of this size, over a minute in ones of 1 << 16."""

MOST_READ = 10
"""Text for the trainer is spread over at most this many times as much. The first 10 MB of the standard library, in
order of their paths, make 1.8% more tokens of text held out than all 30 MB do, and 10 MB spread over them 0.15%
(docs/LOG.md, 2026-11-28)."""

LONG_BLANK = 1 << 16
"""tiktoken's regex gives up on \\s+(?!\\S) between 0.6 and 1 million blanks in a row; well below that is safe."""

_CHARACTER_OF_BYTE = dict(enumerate(byte_characters()))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text falls into pieces, which are encoded one by one, and what follows from that for very long texts."""

    pattern: str
    """The pieces are its matches, one after the other."""
    safe_cut: re.Pattern[str]
    """Ends where one piece always ends and another begins, whatever follows: cutting there changes no id."""
    blanks: re.Pattern[str]
    """A run of what `\\s+(?!\\S)` takes."""
    as_json: dict[str, Any]
    """The pattern in the form of tokenizer.json."""


def gpt4_pre_tokenizer(max_digits: int) -> PreTokenizer:
    """Pieces by `gpt4_pattern`. ConfigError for a number of digits that the regex engine cannot do."""
    if not 1 <= max_digits <= MAX_DIGITS_LIMIT:
        raise ConfigError("tokenizer.max_digits", max_digits, f"must be in 1..{MAX_DIGITS_LIMIT}", MAX_DIGITS_LIMIT)
    pattern = gpt4_pattern(max_digits)
    pieces = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return PreTokenizer(
        pattern,
        # Before a space that follows anything visible; before a newline that follows a letter (one that follows a sign
        # belongs to it); after a newline, where a line with something visible begins.
        safe_cut=re.compile(r"\S(?= )|[A-Za-z](?=\n)|\n(?= *\S)"),
        blanks=re.compile(f"[{BLANKS}]+"),
        as_json={"type": "Sequence", "pretokenizers": [pieces, byte_level()]},
    )


def gpt4_pattern(max_digits: int) -> str:
    """GPT-4's pre-tokenization with at most `max_digits` digits a piece (its limit is 3).

    cl100k_base (openai/tiktoken, `openai_public.py`) as first published. Its present form, with possessive quantifiers,
    cuts otherwise only blanks after a newline at the very end of a text, and is slower: here a single branch
    needs backtracking (18 MB/s a thread on the standard library instead of 14).
    """
    return (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,"
        + str(max_digits)
        + r"}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


class ByteLevelBpe(Tokenizer):
    """256 bytes, one entry for each merge in the order learned, BOS last."""

    def __init__(
        self, byte_order: Sequence[int], merges: Sequence[Merge], pre_tokenizer: PreTokenizer, settings: str
    ) -> None:
        """`byte_order`: the byte that each of the ids 0..255 stands for. ValueError for a merge of tokens that are not
        there yet, or one that makes a token that is."""
        self.merges = tuple(merges)
        self.pre_tokenizer = pre_tokenizer
        ranks = {bytes([value]): rank for rank, value in enumerate(byte_order)}
        for left, right in self.merges:
            if left not in ranks or right not in ranks or left + right in ranks:
                raise ValueError(f"merge of {left!r} and {right!r} does not follow from those before it")
            ranks[left + right] = len(ranks)
        super().__init__(list(ranks), bos=True, settings=settings)
        self._encoding = self._make_encoding(pre_tokenizer.pattern, ranks)

    @functools.cached_property
    def _whole(self) -> tiktoken.Encoding:
        """Takes a text as one piece. Few texts need it, and GPT-2's takes 0.1 s to make."""
        return self._make_encoding(r"[\s\S]+", {token: rank for rank, token in enumerate(self.tokens[:-1])})

    def _make_encoding(self, pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
        # With no special token at all tiktoken looks for the empty string at every position: 14 MB/s become 8.
        special = {self.bos_name: len(ranks)}
        return tiktoken.Encoding("gptlab", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> np.ndarray:
        parts = list(safe_parts(text, self.pre_tokenizer))
        return self._encode_part(text) if len(parts) == 1 else np.concatenate(self.encode_batch(parts))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """On every core: tiktoken lets go of the interpreter lock. Very long texts are shared out too."""
        parts = [list(safe_parts(text, self.pre_tokenizer)) for text in texts]
        tasks = _tasks(part for of_text in parts for part in of_text)
        with ThreadPoolExecutor(_usable_cores()) as pool:
            encoded = chain.from_iterable(pool.map(self._encode_parts, tasks))
            return [np.concatenate([next(encoded) for _ in of_text]) for of_text in parts]

    def _encode_parts(self, parts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode_part(part) for part in parts]

    def _encode_part(self, text: str) -> np.ndarray:
        try:
            return self._ids(self._encoding, text)
        except UnicodeEncodeError:
            utf8(text)  # raises UserError
            raise
        except ValueError:  # the regex engine gave up
            return np.concatenate([self._ids(encoding, piece) for encoding, piece in self._around_blanks(text)])

    @staticmethod
    def _ids(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
        # Not encode_ordinary: it builds a list of Python ints, and puts U+FFFD where a lone surrogate was.
        return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def _around_blanks(self, text: str) -> Iterator[tuple[tiktoken.Encoding, str]]:
        """Cut out runs of blanks too long for the regex engine, as the pieces that the pattern would make of them.

        `\\s+(?!\\S)` takes a run but for its last blank, which goes with what follows; all of it at the end of the
        text. Where newlines are not blanks, a run before one belongs to `\\s*[\\r\\n]+`, which the engine does without
        backtracking.
        """
        start = 0
        for run in self.pre_tokenizer.blanks.finditer(text):
            follower = text[run.end() : run.end() + 1]
            if run.end() - run.start() < LONG_BLANK or follower in ("\r", "\n"):
                continue
            end = run.end() - 1 if follower else run.end()
            yield self._encoding, text[start : run.start()]
            yield self._whole, text[run.start() : end]
            start = end
        yield self._encoding, text[start:]

    @functools.cached_property
    def _written(self) -> dict[bytes, str]:
        """Every token with a printable character for each byte, in the order of the ids."""
        return {token: token.decode("latin-1").translate(_CHARACTER_OF_BYTE) for token in self.tokens[:-1]}

    def to_json(self) -> dict[str, Any]:
        written = self._written
        return document(
            [*written.values(), self.bos_name],
            merges=[[written[left], written[right]] for left, right in self.merges],
            pre_tokenizer=self.pre_tokenizer.as_json,
            decoder=byte_level(),
        )


class BpeTokenizer(ByteLevelBpe):
    """Merges learned from a text; the bytes in order; pieces as GPT-4's but for the digits."""

    kind = "bpe"

    def __init__(self, merges: Sequence[Merge], max_digits: int) -> None:
        """ConfigError or ValueError as `gpt4_pre_tokenizer` and `ByteLevelBpe` raise them."""
        self.max_digits = max_digits
        settings = f"digits={max_digits} merges={tuple(merges)!r}"
        super().__init__(range(256), merges, gpt4_pre_tokenizer(max_digits), settings)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> BpeTokenizer:
        """KeyError, TypeError or ValueError where the parts are not those of `to_json`."""
        pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        digits = re.search(r"\\p\{N\}\{1,([0-9]{1,4})\}", pattern)
        if digits is None:
            raise ValueError("its pattern is another")
        return cls(merges_from_json(content["model"]["merges"]), int(digits[1]))


def merges_from_json(merges: Sequence[Sequence[str]]) -> list[Merge]:
    """Merges of a byte-level tokenizer.json as bytes."""
    byte_of = {character: value for value, character in enumerate(byte_characters())}

    def read(token: str) -> bytes:
        return bytes(map(byte_of.__getitem__, token))

    return [(read(left), read(right)) for left, right in merges]


def spread_share(config: TokenizerConfig, texts: Iterable[str], most_bytes: int | None) -> float:
    """How much of each part of the texts to take, so that `train_bytes` of them all are taken. `most_bytes`: a limit of
    what they have; None where there is none, and then the first `train_bytes` are taken (1.0)."""
    if config.kind != "bpe" or most_bytes is None or most_bytes <= config.train_bytes:
        return 1.0
    total, most = 0, MOST_READ * config.train_bytes
    for text in texts:
        total += len(utf8(text))
        if total >= most:
            return 1 / MOST_READ
    return min(1.0, config.train_bytes / max(total, 1))


def train_bpe(config: TokenizerConfig, texts: Iterable[str], share: float, console: Console) -> BpeTokenizer:
    """Merges from a `share` of each part of `texts`, at most `train_bytes`. ConfigError where they do not give
    `vocab_size` entries.

    Measured on two cores: 31.5 MB of Python sources to 4096 entries in 3.5 s, 2.3 s of them for counting the pieces.
    """
    import tokenizers  # takes 0.05 s, and most runs find their tokenizer in the cache
    from tokenizers import models, pre_tokenizers, trainers

    pre_tokenizer = gpt4_pre_tokenizer(config.max_digits)
    # The trainer's ids are not used: it puts the bytes in the order of the characters that stand for them.
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pre_tokenizer.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1,  # The last id is BOS.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with ExitStack() as learning:
        learner.train_from_iterator(_portions(texts, share, pre_tokenizer, config, console, learning), trainer)
    merges = merges_from_json(json.loads(learner.to_str())["model"]["merges"])
    found = 256 + len(merges) + 1
    if found < config.vocab_size:
        raise ConfigError("tokenizer.vocab_size", config.vocab_size, "the text does not give that many entries", found)
    return BpeTokenizer(merges, config.max_digits)


def _portions(
    texts: Iterable[str],
    share: float,
    pre_tokenizer: PreTokenizer,
    config: TokenizerConfig,
    console: Console,
    learning: ExitStack,
) -> Iterator[str]:
    """A `share` of the texts, in portions, until `train_bytes` are reached. After the last one, the console shows,
    until `learning` closes, that merges are learned: the library begins to learn when this iterator ends."""
    left, owed = config.train_bytes, 0.0
    with console.progress("reading text for the tokenizer", None, "bytes") as counter:
        for portion in (portion for text in texts for portion in _cut(text, pre_tokenizer)):
            data = utf8(portion)
            owed += share * len(data)
            if owed < len(data) / 2:
                continue
            owed -= len(data)
            data = data[:left]
            yield data.decode(errors="ignore")  # drops a character that the limit cuts
            left -= len(data)
            counter.advance(len(data))
            if left <= 0:
                break
    if left == config.train_bytes:
        raise UserError("no text to train a tokenizer on")
    learning.enter_context(console.busy(f"learning the merges of {config.vocab_size} tokens"))


def _cut(text: str, pre_tokenizer: PreTokenizer) -> Iterator[str]:
    """Portions at safe places, and anywhere in text that has none."""
    for part in safe_parts(text, pre_tokenizer, PORTION_CHARACTERS):
        for start in range(0, len(part), 2 * PORTION_CHARACTERS):
            yield part[start : start + 2 * PORTION_CHARACTERS]


def safe_parts(text: str, pre_tokenizer: PreTokenizer, characters: int = PART_CHARACTERS) -> Iterator[str]:
    """`text` in parts of `characters` or a little more, cut only where encoding is not changed by it."""
    start = 0
    while len(text) - start > characters:
        cut = pre_tokenizer.safe_cut.search(text, start + characters)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    if start < len(text) or not text:
        yield text[start:]


def _tasks(parts: Iterable[str]) -> Iterator[list[str]]:
    """The parts in their order, in lists of `TASK_CHARACTERS` or more."""
    task: list[str] = []
    characters = 0
    for part in parts:
        task.append(part)
        characters += len(part)
        if characters >= TASK_CHARACTERS:
            yield task
            task, characters = [], 0
    yield task


def _usable_cores() -> int:
    """Cores this process may use; containers and batch systems grant fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
