"""The weights that a run begins with, read from where `init_from` found them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlab.app.loaded_run import best_saved_step
from gptlab.config.errors import UserError
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.model.interop.hf_folder import read_hf_weights
from gptlab.model.interop.pretrained import Pretrained
from gptlab.runtime.records.identity import require_own, saved_identity
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import load_checkpoint, load_newest, select_checkpoint
from gptlab.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run's first weights came from."""

    text: str
    """In words."""
    fingerprint: str
    """Of every name, type, shape and bit of them."""


def require_tokenizer(tokenizer: Tokenizer, pretrained: Pretrained, warn: Callable[[str], None]) -> None:
    """The ids that the weights know. Another vocabulary of the same size is told and no more: it may be meant so."""
    if tokenizer.vocab_size != pretrained.model.vocab_size:
        raise UserError(
            f"the weights of {pretrained.name} know {pretrained.model.vocab_size} tokens, but the tokenizer has "
            f"{tokenizer.vocab_size} entries; leave tokenizer.kind and tokenizer.path out to have the weights' own"
        )
    if tokenizer.fingerprint != pretrained.load_tokenizer().fingerprint:
        warn(f"the tokenizer is not the one that the weights of {pretrained.name} were trained with")


def load_start_weights(state: TrainState, found: Pretrained, warn: Callable[[str], None]) -> Start:
    """Put the weights that were found into a run whose model they fit (`require_fits`).

    Of a run those of its best checkpoint, or the newest where no validation tells which that is. Of learned positions
    the first that the model has room for (nanoGPT's crop_block_size). UserError where they cannot be read.
    """
    tensors, text = _read(found, warn)
    positions = tensors.get("position_embedding.weight")
    shorter = {} if positions is None else {"position_embedding.weight": positions[: state.model.config.seq_len]}
    try:
        state.load_weights({**tensors, **shorter})
    except UserError as error:
        raise UserError(f"cannot begin with the weights of {text}: {error}") from None
    return Start(text, weights_fingerprint(tensors))


def _read(found: Pretrained, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], str]:
    if not found.is_run:
        return read_hf_weights(found.folder, found.model), found.name
    run = RunDirectory.open(found.folder)
    if not run.checkpoints_path.is_dir():
        raise UserError(f"{found.folder} has no checkpoint yet: there are no weights to begin with")
    best = best_saved_step(run)
    if best is None:
        saved = load_newest(run.checkpoints_path, warn)
    else:
        saved = load_checkpoint(select_checkpoint(run.checkpoints_path, "best", warn, best_step=best))
    require_own(run, saved_identity(saved.state, saved.path), saved.path)
    return saved.model, f"{found.name}, {'newest' if best is None else 'best'} checkpoint: step {saved.step}"


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 that changes with every name, type, shape and bit; the same wherever the tensors lie."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
