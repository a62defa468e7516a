"""nanoGPT's meta.pkl: which character each token is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.runtime.files.restricted_pickle import read_plain_pickle


def read_character_table(path: Path) -> str:
    """The characters of {vocab_size: int, stoi: {character: id}, itos: {id: character}}, in the order of their ids.

    UserError where the file is not such a table, or ids and characters are not one to one.
    """
    table = read_plain_pickle(path)
    flaw = _flaw(table)
    if flaw is not None:
        raise UserError(
            f"{path} is not a table of characters: {flaw}; name the tokenizer with tokenizer.path, or make the file "
            "again with nanoGPT's prepare.py"
        )
    return "".join(table["itos"][index] for index in range(table["vocab_size"]))


def _flaw(table: Any) -> str | None:
    if type(table) is not dict:
        return f"it holds a {type(table).__name__}, not a dict with vocab_size, stoi and itos"
    for key, kind in (("vocab_size", int), ("stoi", dict), ("itos", dict)):
        if type(table.get(key)) is not kind:
            return f"its {key} is missing or no {kind.__name__}"
    stoi, itos, n = table["stoi"], table["itos"], table["vocab_size"]
    if not (n > 0 and len(itos) == len(stoi) == n):
        return f"vocab_size is {n}, itos has {len(itos)} entries and stoi {len(stoi)}"
    for index in range(n):
        character = itos.get(index)
        if type(character) is not str or len(character) != 1:
            return f"itos has no single character for id {index}"
        if "\ud800" <= character <= "\udfff":
            return f"id {index} is half of a UTF-16 pair, which is not a character"
        if type(stoi.get(character)) is not int or stoi[character] != index:
            return f"itos says that id {index} is {character!r}, and stoi does not"
    return None
