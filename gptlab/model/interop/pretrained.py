"""Finds trained weights that a run may start from, and the model and tokenizer they belong to.

Reads JSON only, no weights. Never downloads: OpenAI's names are looked up in the Hugging Face hub's local cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from gptlab.config.errors import ConfigError, UserError, nearest_name
from gptlab.config.load import apply_overrides, config_from_json
from gptlab.config.model import GPT2_SIZES, ModelConfig
from gptlab.config.recipes.nanogpt import TINY_PRETRAINED
from gptlab.config.run import RunConfig, TokenizerConfig, TokenizerKind
from gptlab.data.tokenizer.tokenizer import Tokenizer, gpt2_tokenizer, load_tokenizer
from gptlab.model.interop.hf_config import CONFIG_FILE, WEIGHT_FILES, model_config_of, read_hf_config
from gptlab.runtime.files.plain_file import read_json_object
from gptlab.runtime.records.run_directory import RunDirectory

HUB_OWNER = "openai-community"
"""The owner of OpenAI's GPT-2 on the hub: openai-community/gpt2 and so on."""
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
# nanoGPT pads GPT-2's 50,257 entries to 50,304, a multiple of 64; others go up to 1024.
_PADDING_MULTIPLES = (64, 128, 256, 512, 1024)
_OWN_CHOICES = ("dropout", "seq_len")
"""Fields of a model that do not depend on its weights."""
_FIXED = (
    "n_layer", "n_embd", "n_head", "kv_heads", "mlp_width", "vocab_size", "vocab_multiple", "norm", "position", "bias",
    "tied_head", "value_embeddings", "residual_lambdas",
)  # fmt: skip
"""Fields that decide which weights there are, their shapes, and which part belongs to which head."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    name: str
    """As the user wrote it."""
    folder: Path
    is_run: bool
    """A folder of `gptlab train` or `gptlab import`; otherwise one that transformers reads."""
    model: ModelConfig
    tokenizer: TokenizerConfig

    def load_tokenizer(self) -> Tokenizer:
        return gpt2_tokenizer() if self.tokenizer.path is None else load_tokenizer(self.tokenizer.path)


def find_pretrained(name: str) -> Pretrained:
    """The folder that `init_from` names, or one of OpenAI's models in the local cache. ConfigError if it does not
    exist, UserError if it cannot be used."""
    folder, size = Path(name), openai_name(name)
    if folder.is_dir():
        if "schema_version" in read_json_object(folder / CONFIG_FILE):
            run = RunDirectory.open(folder)
            config = config_from_json(run.read_config())
            return Pretrained(name, folder, True, config.model, replace(config.tokenizer, path=str(run.tokenizer_path)))
        return hf_pretrained(folder, name=name)
    if size is not None and (cached := cached_folder(f"{HUB_OWNER}/{size}")) is not None:
        return hf_pretrained(cached, name=name)
    nearest = None
    if size is not None:
        reason = (
            "its weights are not on this machine, and training downloads nothing: "
            f"`gptlab import hf {size} DIR` does, then --init-from DIR"
        )
    elif folder.is_file():
        reason = "is a file; a checkpoint of nanoGPT comes in by `gptlab import nanogpt FILE DIR`, then --init-from DIR"
    elif name == "scratch":
        reason = "is nanoGPT's word for random weights: leave it out, or give none"
    elif name == TINY_PRETRAINED:
        reason = (
            f"there is no such run yet: `gptlab train nanogpt/gpt2-124m-tiny --run-dir {name}` makes it, "
            "or begin with another by --init-from RUN"
        )
    else:
        reason = f"there is no such folder, and the names are {', '.join(GPT2_SIZES)}"
        nearest = nearest_name(name, GPT2_SIZES)
    raise ConfigError("init_from", name, reason, nearest)


def begin_from(name: str, config: RunConfig, asked: Mapping[str, Any]) -> RunConfig:
    """A recipe's configuration for a run that starts from the weights `name`: their model and tokenizer, with the
    recipe's dropout and at most its context; then the fields `asked` for, {dotted field: value}. Checked by
    `require_fits`.

    OpenAI's shapes are known without their weights, and a recipe knows the shape of the weights that it names itself.
    """
    size = None if Path(name).is_dir() else openai_name(name)
    if size is None and "init_from" not in asked and not Path(name).exists():
        return apply_overrides(config, asked)
    if size is not None:
        model, tokenizer = GPT2_SIZES[size], TokenizerConfig(kind="gpt2")
    else:
        found = find_pretrained(name)
        model, tokenizer = found.model, found.tokenizer
    seq_len = asked.get("model.seq_len", min(config.model.seq_len, model.seq_len))
    values = {field.name: getattr(model, field.name) for field in fields(model) if field.name not in _OWN_CHOICES}
    if "S" in model.window_pattern:  # half of the context that the weights learned in, not of the shorter one
        values["window_tokens"] = model.short_window
    wanted = {f"model.{field}": value for field, value in values.items()} | {"model.seq_len": seq_len}
    if not any(field.startswith("tokenizer.") for field in asked):
        wanted |= {f"tokenizer.{field.name}": getattr(tokenizer, field.name) for field in fields(tokenizer)}
    result = apply_overrides(config, wanted | dict(asked))
    require_fits(result.model, model, name)
    return result


def require_fits(config: ModelConfig, weights: ModelConfig, name: str) -> None:
    """ConfigError for the first field with which a model cannot take these weights. A shorter context is fine, and so
    is a longer one unless positions are learned."""
    for field in _FIXED:
        own, there = getattr(config, field), getattr(weights, field)
        if own != there and not (field == "vocab_size" and own is None):
            place = {"kv_heads": "n_kv_head", "mlp_width": "mlp_ratio"}.get(field, field)
            there_text = f"{field} {there}" if place != field else there
            raise ConfigError(f"model.{place}", getattr(config, place), f"the weights of {name} have {there_text}")
    if config.seq_len > weights.seq_len and weights.position == "learned":
        reason = f"the weights of {name} have {weights.seq_len} learned positions, and no values for more"
        raise ConfigError("model.seq_len", config.seq_len, reason, weights.seq_len)


def hf_pretrained(folder: Path, *, name: str, tokenizer: str | None = None) -> Pretrained:
    """A folder that transformers reads; messages call it `name`. The tokenizer is that of the folder `tokenizer`, its
    own, or GPT-2's.

    UserError if it cannot be used, or if model and tokenizer do not fit.
    """
    model = model_config_of(read_hf_config(folder))
    if tokenizer is None and any((folder / file).is_file() for file in _TOKENIZER_FILES):
        tokenizer = str(folder)
    found = gpt2_tokenizer() if tokenizer is None else load_tokenizer(tokenizer)
    whose = f"{folder}, which has no tokenizer beside it," if tokenizer is None else str(folder)
    remedy = "`gptlab import hf` takes the folder of another one as --tokenizer"
    model = with_vocabulary(model, found, of=whose, remedy=remedy)
    return Pretrained(name, folder, False, model, tokenizer_settings(found, tokenizer))


def with_vocabulary(model: ModelConfig, tokenizer: Tokenizer, *, of: str, remedy: str) -> ModelConfig:
    """The model `of` a file with the tokenizer's vocabulary; further rows of its table are padding.

    UserError, with the `remedy`, if its vocabulary is neither the tokenizer's nor that padded to a usual multiple.
    """
    rows, entries = model.vocab_size or 0, tokenizer.vocab_size
    if rows == entries:
        return model
    is_padding = rows in [-(-entries // multiple) * multiple for multiple in _PADDING_MULTIPLES]
    if not is_padding or rows - entries >= max(64, entries // 8):  # else any small tokenizer fits any small model
        name = "GPT-2's tokenizer" if tokenizer.kind == "gpt2" else f"the {tokenizer.kind} tokenizer"
        raise UserError(f"{of} has a vocabulary of {rows:,}, but {name} has {entries:,} entries: {remedy}")
    unpadded = replace(model, vocab_size=entries)
    return unpadded if unpadded.padded_vocab_size == rows else replace(unpadded, vocab_multiple=rows)


def tokenizer_settings(tokenizer: Tokenizer, folder: str | None) -> TokenizerConfig:
    """The configuration of this tokenizer, which is in `folder` (None: it comes with gptlab)."""
    kind = cast(TokenizerKind, tokenizer.kind)
    vocab_size = tokenizer.vocab_size if kind == "bpe" else TokenizerConfig().vocab_size
    return TokenizerConfig(kind=kind, path=folder, vocab_size=vocab_size)


def openai_name(name: str) -> str | None:
    """gpt2 for gpt2 and openai-community/gpt2; None for any name but the four."""
    size = name.removeprefix(f"{HUB_OWNER}/")
    return size if size in GPT2_SIZES else None


def hub_repository(path: str) -> str:
    """OWNER/NAME of a model on the hub. UserError for anything else."""
    size = openai_name(path)
    if size is not None:
        return f"{HUB_OWNER}/{size}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        return path
    raise UserError(
        f"there is no folder {path}, and models of the hub are named {', '.join(GPT2_SIZES)}, or OWNER/NAME"
    )


def cached_folder(repository: str) -> Path | None:
    """The model's snapshot in the local cache of the Hugging Face hub, if it has config.json and weights."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, CONFIG_FILE)
    if not isinstance(found, str) or not any((Path(found).parent / file).is_file() for file in WEIGHT_FILES):
        return None
    return Path(found).parent
