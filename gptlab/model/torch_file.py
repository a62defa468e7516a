"""Files of `torch.save`, which are pickle: read through torch's restricted unpickler, which runs no code of the file.

It builds tensors, numbers, texts, dicts and lists, and stops at the first thing that is none of them.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from gptlab.config.errors import UserError


def read_torch_file(path: Path) -> dict[str, object]:
    """The dict in a file of `torch.save`, its tensors mapped from the disk (CPU). UserError for anything else."""
    try:
        # Files from before torch 1.6 are no zip archives, and cannot be mapped.
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    # A file that is no checkpoint, or a damaged one, makes the unpickler raise whatever its bytes lead to.
    except Exception as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no dict, but a {type(value).__name__}: it is no checkpoint")
    return {str(name): item for name, item in value.items()}


def only_tensors(values: object, path: Path) -> dict[str, Tensor]:
    """`values` as {name: tensor}, without the prefix that torch.compile gives. UserError where it is not that."""
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise UserError(f"{path} holds no table of tensors by name")
    return {str(name).removeprefix("_orig_mod."): value for name, value in values.items()}


def _reason(error: Exception) -> str:
    """torch explains a refusal in a dozen lines; what the file wanted to call stands in one of them."""
    text = str(error)
    if wanted := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it asks for {wanted[1]}, which is neither a tensor nor a plain value; nothing of it was run"
    return f"it is damaged, or no file of torch.save ({text.partition(chr(10))[0][:120] or type(error).__name__})"
