"""Weights from a folder of transformers: config.json beside safetensors, one file or several, or pytorch_model.bin."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.config.plain_file import open_plain
from gptlab.model.interop.export_config import Form
from gptlab.model.interop.export_weights import from_transformers
from gptlab.model.interop.hf_config import WEIGHT_FILES, read_hf_config
from gptlab.model.interop.torch_file import only_tensors, read_torch_file
from gptlab.runtime.files.strict_json import read_json_object

MAX_HEADER_BYTES = 1 << 23
"""About 100 bytes a tensor: a model of 400 layers has 1 MB. The library takes 100 MB, and seconds to parse them."""
_SINGLE, _INDEX, _PICKLED = WEIGHT_FILES


def read_hf_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The weights by gptlab's names, for `config`: that of `model_config_of`, or one that leaves rows of its vocabulary
    unused. UserError where they are missing, damaged, or do not fit."""
    form = cast(Form, read_hf_config(folder)["model_type"])  # one of them, or there would be no `config`
    tensors = read_hf_tensors(folder)
    try:
        return from_transformers(tensors, config, form)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def read_hf_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by their own names, on the CPU; safetensors where there are any. UserError where there are none."""
    if (folder / _SINGLE).is_file():
        return _read_safetensors(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    if (folder / _PICKLED).is_file():
        return only_tensors(read_torch_file(folder / _PICKLED), folder / _PICKLED)
    raise UserError(f"{folder} holds no weights: there is no {_SINGLE}, {_INDEX} or {_PICKLED}")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_json_object(folder / _INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{folder / _INDEX} is damaged: it has no weight_map")
    tensors: dict[str, Tensor] = {}
    if not all(isinstance(value, str) for value in places.values()):
        raise UserError(f"{folder / _INDEX} is damaged: its weight_map names no files")
    for name in sorted(set(places.values())):
        if Path(name).name != name or set(name) & set("\\:\0"):
            raise UserError(f"{folder / _INDEX} names {name!r}, which lies outside of the folder")
        tensors |= _read_safetensors(folder / name)
    missing = sorted(places.keys() - tensors.keys())
    if missing:
        raise UserError(f"{folder / _INDEX} names {missing[0]}, which its file does not hold")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_plain(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise UserError(f"{path} is damaged: it is no whole safetensors file (a header of {header_bytes:,} bytes)")
        return load_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: it is no whole safetensors file ({error})") from None
