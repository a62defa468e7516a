"""Makes a tokenizer from text, and reads one from disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.data import TokenizerConfig
from gptlab.config.errors import UserError
from gptlab.data.tokenizer import gpt2, json_file
from gptlab.data.tokenizer.base import ByteTokenizer, CharTokenizer, Tokenizer, utf8
from gptlab.data.tokenizer.bpe import BpeTokenizer, train_bpe
from gptlab.data.tokenizer.gpt2 import gpt2_tokenizer

if TYPE_CHECKING:
    from gptlab.runtime.records.console import Console

__all__ = [
    "BpeTokenizer", "ByteTokenizer", "CharTokenizer", "Tokenizer",
    "gpt2_tokenizer", "load_tokenizer", "save_for_transformers", "train_tokenizer",
]  # fmt: skip


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, bos: bool, progress: Console | None = None
) -> Tokenizer:
    """A tokenizer of `config.kind` for `texts`; progress is shown on the console given.

    `bos`: whether a char tokenizer gets a BOS (the others always have one). UserError for no text, a vocabulary larger
    than the text can give (it names what the text gives), and text that is not Unicode. byte and gpt2 read no text.
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "gpt2":
        return gpt2_tokenizer()
    if config.kind == "bpe":
        return train_bpe(config, texts, progress)
    characters: set[str] = set()
    for text in texts:
        utf8(text)
        characters.update(text)
    return CharTokenizer(characters, bos)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer that `save` put into `folder`, or GPT-2's as `transformers` or OpenAI did. UserError where it is
    missing, damaged, or another one.

    The kind shows in the pre-tokenizer. The parts that cannot be derived are read, the rest is rebuilt from them and
    must be what the file says: so no file loads that transformers would encode otherwise.
    """
    folder = Path(folder)
    if json_file.adds_prefix_space(folder):
        json_file.refuse(folder / json_file.CONFIG_FILE, "add_prefix_space changes every text")
    if not (folder / json_file.FILE).exists() and (folder / gpt2.VOCAB_FILE).exists():
        return gpt2.load_vocabulary_files(folder)
    content = json_file.read(folder)
    try:
        content = json_file.canonical(content)
        tokenizer = _rebuild(content)
        flaw = json_file.difference(content, tokenizer.to_json(), bos=tokenizer.bos_token)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UserError) as error:
        flaw = f"{type(error).__name__}: {error}"
    if flaw is not None:
        json_file.refuse(folder / json_file.FILE, f"its parts do not fit together ({flaw})")
    return tokenizer


def _rebuild(content: dict[str, Any]) -> Tokenizer:
    splitter = content["pre_tokenizer"]
    if splitter is None:
        return CharTokenizer.from_json(content)
    if splitter["type"] != "ByteLevel":
        return BpeTokenizer.from_json(content)
    return gpt2_tokenizer() if splitter["use_regex"] else ByteTokenizer()


def save_for_transformers(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json beside an exported model, for AutoTokenizer; `max_tokens` is the
    model's context.

    With add_special_tokens=False the ids are those of `encode`. By default BOS comes first, where there is one: as
    `gptlab sample` puts it before every prompt, and packed training rows begin.
    """
    tokenizer.save(folder)
    content, config = json_file.read(folder), json_file.read(folder, json_file.CONFIG_FILE)
    bos = tokenizer.bos_token
    if bos is not None:
        special: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
        text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text, special, second],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        }
        config |= {"eos_token": bos, "pad_token": bos}
    config |= {
        "model_max_length": max_tokens,
        # Prompts of a batch must end together. And no token types: GPT-2 would take them for tokens.
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for name, value in ((json_file.FILE, content), (json_file.CONFIG_FILE, config)):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
