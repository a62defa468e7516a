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
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.plain_file import read_plain
from gptlab.data.tokenizer import json_file
from gptlab.data.tokenizer.bpe import BLANKS, ByteLevelBpe, PreTokenizer, merges_from_json

MERGES_FILE = "gpt2_merges.txt.gz"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
VOCAB_SIZE = 50_257

VOCAB_FILE = "vocab.json"
OTHER_MERGES_FILE = "merges.txt"
ADDED_FILE = "added_tokens.json"
"""What transformers calls OpenAI's encoder.json and vocab.bpe, and keeps beside them where a user added entries."""
MAX_MERGES_FILE_BYTES = 1 << 24

PRE_TOKENIZER = PreTokenizer(
    # r50k_base of openai/tiktoken (`openai_public.py`) as first published; its present form, with possessive
    # quantifiers, makes the same pieces and is slower (15 MB/s a thread on the standard library instead of 18).
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # A blank ends what is visible. Not after a newline, as in GPT-4's: it is a blank here, and a run of blanks is
    # one piece at the end of a text, but two before a letter.
    safe_cut=re.compile(f"[^{BLANKS}\r\n](?=[{BLANKS}\r\n])"),
    blanks=re.compile(f"[{BLANKS}\r\n]+"),
    as_json=json_file.byte_level(use_regex=True),
)


class Gpt2Tokenizer(ByteLevelBpe):
    """`<|endoftext|>` (50256) separates documents, and is this tokenizer's BOS. In a text it is text."""

    kind = "gpt2"
    bos_name = "<|endoftext|>"

    def __init__(self) -> None:
        """UserError where the file with the merges is damaged."""
        # The order of encoder.json: printable Latin-1 before the characters that stand for the other bytes.
        byte_order = sorted(range(256), key=json_file.byte_characters().__getitem__)
        super().__init__(byte_order, merges_from_json(_published_merges()), PRE_TOKENIZER, settings="")

    def __reduce__(self) -> tuple[Any, ...]:
        return gpt2_tokenizer, ()


@functools.cache
def gpt2_tokenizer() -> Gpt2Tokenizer:
    """One for the process: it never changes, and making it takes 0.2 s."""
    return Gpt2Tokenizer()


def load_vocabulary_files(folder: Path) -> Gpt2Tokenizer:
    """GPT-2's tokenizer where `folder` holds its vocab.json and merges.txt, as transformers had it before
    tokenizer.json. UserError where they differ."""
    vocabulary = json_file.read(folder, VOCAB_FILE)
    if vocabulary != gpt2_tokenizer().to_json()["model"]["vocab"]:
        json_file.refuse(folder / VOCAB_FILE, "its entries differ from GPT-2's")
    if (folder / ADDED_FILE).exists() and not json_file.read(folder, ADDED_FILE).keys() <= vocabulary.keys():
        json_file.refuse(folder / ADDED_FILE, "it has more entries than GPT-2")
    if _merges_of(folder / OTHER_MERGES_FILE) != _published_merges():
        json_file.refuse(folder / OTHER_MERGES_FILE, "its merges differ from GPT-2's")
    return gpt2_tokenizer()


def _published_merges() -> list[list[str]]:
    """(50000) pairs of strings in byte-level characters."""
    try:
        data = gzip.decompress((resources.files(__package__) / MERGES_FILE).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read gptlab's own {MERGES_FILE} ({error}); install gptlab again") from error
    if hashlib.sha256(data).hexdigest() != MERGES_SHA256:
        raise UserError(f"gptlab's own {MERGES_FILE} is not the file it came with; install gptlab again")
    return _parse_merges(data.decode())


def _merges_of(path: Path) -> list[list[str]]:
    try:
        return _parse_merges(read_plain(path, MAX_MERGES_FILE_BYTES).decode())
    except OSError as error:
        raise UserError(
            f"no tokenizer in {path.parent}: cannot read {path.name} ({error.strerror or error})"
        ) from error
    except UnicodeDecodeError:
        json_file.refuse(path, "it is not UTF-8 text")


def _parse_merges(text: str) -> list[list[str]]:
    lines = text.replace("\r\n", "\n").split("\n")
    return [line.split(" ") for line in lines if line and not line.startswith("#version")]
