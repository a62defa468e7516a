"""Makes a tokenizer from text, and reads one from disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from gptlab.config.errors import UserError
from gptlab.config.run import TokenizerConfig
from gptlab.data.tokenizer.base import CONFIG_FILE, FILE, MODEL, ByteTokenizer, CharTokenizer, Tokenizer, utf8
from gptlab.data.tokenizer.bpe import BpeTokenizer, spread_share, train_bpe
from gptlab.data.tokenizer.gpt2 import gpt2_tokenizer, parse_merges, published_merges
from gptlab.runtime.files.plain_file import read_plain
from gptlab.runtime.files.restricted_pickle import read_plain_pickle
from gptlab.runtime.records.console import Console, QuietConsole

__all__ = [
    "BpeTokenizer", "ByteTokenizer", "CharTokenizer", "Tokenizer",
    "gpt2_tokenizer", "load_tokenizer", "read_character_table", "save_for_transformers", "spread_share",
    "train_tokenizer",
]  # fmt: skip

VOCAB_FILE, MERGES_FILE, ADDED_FILE = "vocab.json", "merges.txt", "added_tokens.json"
"""What transformers calls OpenAI's encoder.json and vocab.bpe, and keeps beside them where a user added entries."""
MAX_FILE_BYTES = 1 << 25
"""A vocabulary of 200,000 is 15 MB as gptlab writes it (GPT-4o's 28). As Python's objects JSON takes ten times its
length, so that this bounds memory too."""
MAX_BRACKETS = 2_000_000
"""Two for each merge and a hundred more; empty lists, two bytes each, would take thirty times their length."""


def train_tokenizer(
    config: TokenizerConfig,
    texts: Iterable[str],
    *,
    bos: bool,
    share: float = 1.0,
    console: Console | None = None,
) -> Tokenizer:
    """A tokenizer of `config.kind` for `texts`; `console` shows the progress.

    `share`: of a bpe tokenizer's text, what it is trained on (`spread_share`). `bos`: whether a char tokenizer gets a
    BOS (the others always have one). UserError for no text, a vocabulary larger than the text can give (it names what
    the text gives), and text that is not Unicode. byte and gpt2 read no text.
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "gpt2":
        return gpt2_tokenizer()
    if config.kind == "bpe":
        return train_bpe(config, texts, share, console or QuietConsole())
    characters: set[str] = set()
    for text in texts:
        utf8(text)
        characters.update(text)
    return CharTokenizer(characters, bos)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer that `save` put into `folder`, or GPT-2's as `transformers` or OpenAI did. `folder` may name the
    tokenizer.json in it. UserError where it is missing, damaged, or another one.

    The kind shows in the pre-tokenizer. The parts that cannot be derived are read, the rest is rebuilt from them and
    must be what the file says: so no file loads that transformers would encode otherwise.
    """
    folder = Path(folder)
    folder = folder.parent if folder.name == FILE else folder
    if (folder / CONFIG_FILE).exists() and _read_json(folder, CONFIG_FILE).get("add_prefix_space"):
        _refuse(folder / CONFIG_FILE, "add_prefix_space changes every text")
    if not (folder / FILE).exists() and (folder / VOCAB_FILE).exists():
        return _load_vocabulary_files(folder)
    content = _read_json(folder, FILE)
    model = content.get("model")
    kind = model.get("type", MODEL["type"]) if isinstance(model, dict) else None
    if isinstance(kind, str) and kind != MODEL["type"]:
        _refuse(folder / FILE, f"its model is {kind[:40]}, and gptlab reads byte-level BPE")
    try:
        content = _canonical(content)
        tokenizer = _rebuild(content)
        flaw = _difference(content, tokenizer)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UserError) as error:
        _refuse(folder / FILE, f"its parts do not fit together ({type(error).__name__}: {error})")
    if flaw is not None:
        _refuse(folder / FILE, f"its {flaw} is not what gptlab or GPT-2 would have")
    return tokenizer


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the folder as an object, not yet checked further. UserError where it is missing or damaged."""
    path = folder / name
    try:
        data = read_plain(path, MAX_FILE_BYTES)
        if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
            _refuse(path, "it has more lists than a tokenizer has merges")
        content = json.loads(data.decode())
    except OSError as error:
        raise UserError(f"no tokenizer in {folder}: cannot read {name} ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it is not valid JSON ({error})")
    if not isinstance(content, dict):
        _refuse(path, f"it holds a JSON {type(content).__name__}, not an object")
    return content


def _canonical(content: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer as gptlab writes it: older files leave parts out, write an empty string for none, and a merge
    as "a b". KeyError, TypeError or AttributeError where it is not a BPE tokenizer."""
    model = {**MODEL, "vocab": {}, "merges": [], **content["model"]}
    for part in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[part] = model[part] or None
    model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer is not None and pre_tokenizer["type"] == "ByteLevel":
        # Offsets are not used, and the library's ByteLevel splits by GPT-2's pattern by default.
        pre_tokenizer = {"use_regex": True, **pre_tokenizer, "trim_offsets": True}
    return {**content, "pre_tokenizer": pre_tokenizer, "model": model}


def _rebuild(content: dict[str, Any]) -> Tokenizer:
    splitter = content["pre_tokenizer"]
    if splitter is None:
        return CharTokenizer.from_json(content)
    if splitter["type"] != "ByteLevel":
        return BpeTokenizer.from_json(content)
    return gpt2_tokenizer() if splitter["use_regex"] else ByteTokenizer()


def _difference(found: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    """The first part of a file that would make it encode otherwise than the tokenizer built from it. The name of BOS
    as an added token is allowed: in a text, gptlab reads it as text."""
    rebuilt = tokenizer.to_json()
    if any(added["content"] != tokenizer.bos_token for added in found.get("added_tokens") or ()):
        return "added_tokens"
    for part in ("normalizer", "pre_tokenizer"):
        if found.get(part) != rebuilt[part]:
            return part
    return next((part for part, value in rebuilt["model"].items() if found["model"].get(part) != value), None)


def _load_vocabulary_files(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer where `folder` holds its vocab.json and merges.txt, as transformers had it before
    tokenizer.json. UserError where they differ."""
    tokenizer = gpt2_tokenizer()
    vocabulary = _read_json(folder, VOCAB_FILE)
    if vocabulary != tokenizer.to_json()["model"]["vocab"]:
        _refuse(folder / VOCAB_FILE, "its entries differ from GPT-2's")
    if (folder / ADDED_FILE).exists() and not _read_json(folder, ADDED_FILE).keys() <= vocabulary.keys():
        _refuse(folder / ADDED_FILE, "it has more entries than GPT-2")
    try:
        merges = read_plain(folder / MERGES_FILE, MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise UserError(f"no tokenizer in {folder}: cannot read {MERGES_FILE} ({error.strerror or error})") from error
    if parse_merges(merges) != published_merges():
        _refuse(folder / MERGES_FILE, "its merges differ from GPT-2's")
    return tokenizer


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(
        f"{path} is neither a tokenizer that gptlab wrote nor GPT-2's: {reason}; make one with `gptlab tokenizer train`"
    )


def read_character_table(path: Path) -> str:
    """The characters of {vocab_size: int, stoi: {character: id}, itos: {id: character}}, in the order of their ids.

    That is nanoGPT's meta.pkl. UserError where the file is not such a table, or ids and characters are not one to one.
    """
    table = read_plain_pickle(path)
    try:
        characters = [table["itos"][index] for index in range(table["vocab_size"])]
        utf8("".join(characters))  # not half of a UTF-16 pair
        sound = characters and all(len(character) == 1 for character in characters)
        ids = {character: index for index, character in enumerate(characters)}
        sound = sound and table["itos"] == dict(enumerate(characters)) and table["stoi"] == ids
    except (KeyError, TypeError, UserError):
        sound = False
    if not sound:
        raise UserError(
            f"{path} is not a table of characters: it needs vocab_size, itos (a character for each id below) and its "
            "inverse stoi; name the tokenizer with tokenizer.path, or make the file again with nanoGPT's prepare.py"
        )
    return "".join(characters)


def save_for_transformers(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json beside an exported model, for AutoTokenizer; `max_tokens` is the
    model's context.

    With add_special_tokens=False the ids are those of `encode`. By default BOS comes first, where there is one: as
    `gptlab sample` puts it before every prompt, and packed training rows begin.
    """
    config: dict[str, Any] = {"model_max_length": max_tokens}
    post_processor: dict[str, Any] | None = None
    if (bos := tokenizer.bos_token) is not None:
        special: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
        text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        post_processor = {
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text, special, second],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
        }
        config = {"pad_token": bos} | config
    # Prompts of a batch must end together. And no token types: GPT-2 would take them for tokens.
    config |= {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
    tokenizer.save(folder, post_processor=post_processor, **config)
