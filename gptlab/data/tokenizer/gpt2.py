"""GPT-2's vocabulary: 256 bytes, 50,000 merges, `<|endoftext|>`; the ids of OpenAI, tiktoken and transformers.

The merges are OpenAI's published `vocab.bpe` (https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe;
its SHA-256, MERGES_SHA256, is the one that tiktoken's `openai_public.py` demands), shipped beside this module
and checked when loaded; OpenAI's modified MIT license is there too. The ids of `encoder.json` follow from the merges:
first the bytes in the order of the characters that stand for them, then the merges, then `<|endoftext|>`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
import zlib
from importlib import resources
from typing import Any

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.base import byte_characters, byte_level
from gptlab.data.tokenizer.bpe import BLANKS, ByteLevelBpe, PreTokenizer, merges_from_json

MERGES_FILE = "gpt2_merges.txt.gz"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
VOCAB_SIZE = 50_257

PRE_TOKENIZER = PreTokenizer(
    # r50k_base of openai/tiktoken (`openai_public.py`) as first published; its present form, with possessive
    # quantifiers, makes the same pieces and is slower (15 MB/s a thread on the standard library instead of 18).
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # A blank ends what is visible. Not after a newline, as in GPT-4's: it is a blank here, and a run of blanks is
    # one piece at the end of a text, but two before a letter.
    safe_cut=re.compile(f"[^{BLANKS}\r\n](?=[{BLANKS}\r\n])"),
    blanks=re.compile(f"[{BLANKS}\r\n]+"),
    as_json=byte_level(use_regex=True),
)


class Gpt2Tokenizer(ByteLevelBpe):
    """`<|endoftext|>` (50256) separates documents, and is this tokenizer's BOS. In a text it is text."""

    kind = "gpt2"
    bos_name = "<|endoftext|>"

    def __init__(self) -> None:
        """UserError where the file with the merges is damaged."""
        # The order of encoder.json: printable Latin-1 before the characters that stand for the other bytes.
        byte_order = sorted(range(256), key=byte_characters().__getitem__)
        super().__init__(byte_order, merges_from_json(published_merges()), PRE_TOKENIZER, settings="")

    def __reduce__(self) -> tuple[Any, ...]:
        return gpt2_tokenizer, ()


@functools.cache
def gpt2_tokenizer() -> Gpt2Tokenizer:
    """One for the process: it never changes, and making it takes 0.2 s."""
    return Gpt2Tokenizer()


def published_merges() -> list[list[str]]:
    """(50000) pairs of strings in byte-level characters."""
    try:
        data = gzip.decompress((resources.files(__package__) / MERGES_FILE).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read gptlab's own {MERGES_FILE} ({error}); install gptlab again") from error
    if hashlib.sha256(data).hexdigest() != MERGES_SHA256:
        raise UserError(f"gptlab's own {MERGES_FILE} is not the file it came with; install gptlab again")
    return parse_merges(data.decode())


def parse_merges(text: str) -> list[list[str]]:
    lines = text.replace("\r\n", "\n").split("\n")
    return [line.split(" ") for line in lines if line and not line.startswith("#version")]
