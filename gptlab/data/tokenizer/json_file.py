"""tokenizer.json in the form of Hugging Face `tokenizers`: one file that transformers, gptlab and people read.

All kinds are BPE models there: `bpe` and `gpt2` with merges, `byte` and `char` without any. BOS is in the model's
vocabulary, where no merge leads to it, and not among the added tokens, which that library looks for in every text: so
the file alone never turns the characters "<|bos|>" into the special token. transformers still adds it to them
when it loads (`bos_token`); `split_special_tokens` in tokenizer_config.json makes it leave texts alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from gptlab.config.errors import UserError
from gptlab.config.plain_file import read_plain

FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAX_FILE_BYTES = 1 << 25
"""A vocabulary of 200,000 is 15 MB as gptlab writes it (GPT-4o's 28). As Python's objects JSON takes ten times its
length, so that this bounds memory too."""
MAX_BRACKETS = 2_000_000
"""Two for each merge and a hundred more; empty lists, two bytes each, would take thirty times their length."""


def byte_characters() -> list[str]:
    """For each byte the printable character that stands for it in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 stands for itself; the others take the code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def document(
    vocab: list[str], *, merges: list[list[str]], pre_tokenizer: dict[str, Any] | None, decoder: dict[str, Any]
) -> dict[str, Any]:
    """The whole of tokenizer.json for a BPE model; ids follow the order of `vocab`."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(vocab)},
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def byte_level(*, use_regex: bool = False) -> dict[str, Any]:
    """Pre-tokenizer and decoder that put characters for bytes, and bytes for characters."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def write(folder: Path, tokenizer: dict[str, Any], *, bos: str | None) -> None:
    """Both files, each put in place at once. UserError where the disk refuses."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if bos is not None:
        # One token separates documents: it begins one and ends the one before.
        config |= {"bos_token": bos, "eos_token": bos, "split_special_tokens": True}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((FILE, tokenizer), (CONFIG_FILE, config)):
            temporary = folder / f".{name}.{os.getpid()}"
            try:
                temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                os.replace(temporary, folder / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the tokenizer to {folder}: {error.strerror or error}") from error


def read(folder: Path, name: str = FILE) -> dict[str, Any]:
    """A JSON file of the folder as an object, not yet checked further. UserError where it is missing or damaged."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            refuse(path, f"{size / 1e6:.0f} MB is too large for a tokenizer")
        data = read_plain(path, MAX_FILE_BYTES)
        if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
            refuse(path, "it has more lists than a tokenizer has merges")
        content = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise UserError(f"no tokenizer in {folder}: cannot read {name} ({error.strerror or error})") from error
    except UnicodeDecodeError:
        refuse(path, "it is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        refuse(path, f"it is not valid JSON ({error})")
    if not isinstance(content, dict):
        refuse(path, f"it holds a JSON {type(content).__name__}, not an object")
    return content


def canonical(content: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer in the words of `document`: older files leave parts out, write an empty string for none, and
    a merge as "a b". KeyError, TypeError or AttributeError where it is not a BPE tokenizer."""
    model = {**document([], merges=[], pre_tokenizer=None, decoder={})["model"], **content["model"]}
    for part in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[part] = model[part] or None
    model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer is not None and pre_tokenizer["type"] == "ByteLevel":
        # Offsets are not used, and the library's ByteLevel splits by GPT-2's pattern by default.
        pre_tokenizer = {"use_regex": True, **pre_tokenizer, "trim_offsets": True}
    return {**content, "pre_tokenizer": pre_tokenizer, "model": model}


def adds_prefix_space(folder: Path) -> bool:
    """Whether transformers would put a space before every text, whatever tokenizer.json says."""
    return (folder / CONFIG_FILE).exists() and bool(read(folder, CONFIG_FILE).get("add_prefix_space"))


def difference(found: dict[str, Any], rebuilt: dict[str, Any], *, bos: str | None) -> str | None:
    """The first part of a file that would make it encode otherwise than the tokenizer built from it. The name of BOS
    as an added token is allowed: in a text, gptlab reads it as text."""
    if any(added["content"] != bos for added in found.get("added_tokens") or ()):
        return "added_tokens"
    for part in ("normalizer", "pre_tokenizer"):
        if found.get(part) != rebuilt[part]:
            return part
    return next((part for part, value in rebuilt["model"].items() if found["model"].get(part) != value), None)


def refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(
        f"{path} is neither a tokenizer that gptlab wrote nor GPT-2's: {reason}; make one with `gptlab tokenizer train`"
    )
