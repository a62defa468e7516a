"""A tokenizer's folder as a model's folder of transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gptlab.data.tokenizer import json_file
from gptlab.data.tokenizer.tokenizer import Tokenizer


def save_for_transformers(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """tokenizer.json and tokenizer_config.json for AutoTokenizer; `max_tokens` is the model's context.

    With add_special_tokens=False the ids are those of `encode`. By default BOS comes first, where there is one: as
    `gptlab sample` puts it before every prompt, and packed training rows begin.
    """
    tokenizer.save(folder)
    content, config = json_file.read(folder), _read_config(folder)
    if tokenizer.bos_id is not None:
        bos = config["bos_token"]
        content["post_processor"] = _bos_first(bos, tokenizer.bos_id)
        config |= {"eos_token": bos, "pad_token": bos}
    config |= {
        "model_max_length": max_tokens,
        # Prompts of a batch must end together. And no token types: GPT-2 would take them for tokens.
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for name, value in ((json_file.FILE, content), (json_file.CONFIG_FILE, config)):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _bos_first(bos: str, bos_id: int) -> dict[str, Any]:
    """The post-processor that puts BOS before a text, and before each of a pair."""
    special: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, special, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / json_file.CONFIG_FILE).read_text(encoding="utf-8")))
