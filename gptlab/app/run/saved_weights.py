"""Weights that a run saved: the checkpoint that is asked for, and the weights that another run starts from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.data.tokenizer.tokenizer import Tokenizer
from gptlab.model.interop.hf_weights import read_hf_weights
from gptlab.model.interop.pretrained import Pretrained
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.identity import require_own, saved_identity
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import Checkpoint, load_checkpoint, load_newest, select_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints, step_of
from gptlab.training.state import TrainState


def own_checkpoint(
    run: RunDirectory, which: str, warn: Callable[[str], None], group: Group | None = None
) -> Checkpoint:
    """`which`: latest | best | a step. UserError where it is not there, damaged, or another run's."""
    if which == "latest":
        saved = load_newest(run.checkpoints_path, warn, group)
    else:
        best = _best_saved_step(run) if which == "best" else None
        saved = load_checkpoint(select_checkpoint(run.checkpoints_path, which, best_step=best))
    require_own(run, saved_identity(saved.state, saved.path), saved.path)
    return saved


def _best_saved_step(directory: RunDirectory) -> int | None:
    """The saved step with the lowest recorded validation loss."""
    saved = {step_of(path) for path in list_checkpoints(directory.checkpoints_path)}
    records = read_metrics(directory.metrics_path) if directory.metrics_path.exists() else []
    try:
        losses = [
            (float(str(record["val_loss"])), int(str(record["step"])))
            for record in records
            if record.get("kind") == "eval" and record["step"] in saved
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory.metrics_path} is damaged: an eval line without its numbers ({error})") from None
    return min((pair for pair in losses if math.isfinite(pair[0])), default=(0.0, None))[1]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run's initial weights came from."""

    text: str
    """For people."""
    fingerprint: str
    """Of their names, types, shapes and bits."""


def require_tokenizer(tokenizer: Tokenizer, pretrained: Pretrained, warn: Callable[[str], None]) -> None:
    """UserError for a vocabulary of another size than the weights'. Another one of the same size may be intended: a
    warning."""
    if tokenizer.vocab_size != pretrained.model.vocab_size:
        raise UserError(
            f"the weights of {pretrained.name} know {pretrained.model.vocab_size} tokens, but the tokenizer has "
            f"{tokenizer.vocab_size} entries; leave the fields of tokenizer out to have the weights' own"
        )
    if tokenizer.fingerprint != pretrained.load_tokenizer().fingerprint:
        warn(f"the tokenizer is not the one that the weights of {pretrained.name} were trained with")


def load_start_weights(state: TrainState, found: Pretrained, warn: Callable[[str], None]) -> Start:
    """Load the weights that were found into a run whose model they fit (`require_fits`).

    From a run: its best checkpoint, or the newest where no validation was recorded. A shorter context keeps the first
    learned positions (nanoGPT's crop_block_size). UserError where the weights cannot be read.
    """
    tensors, text = _read(found, warn)
    positions = tensors.get("position_embedding.weight")
    shorter = {} if positions is None else {"position_embedding.weight": positions[: state.model.config.seq_len]}
    try:
        state.strategy.load_weights({**tensors, **shorter})
    except UserError as error:
        raise UserError(f"cannot begin with the weights of {text}: {error}") from None
    return Start(text, weights_fingerprint(tensors))


def _read(found: Pretrained, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], str]:
    if not found.is_run:
        return read_hf_weights(found.folder, found.model), found.name
    run = RunDirectory.open(found.folder)
    if not run.checkpoints_path.is_dir():
        raise UserError(f"{found.folder} has no checkpoint yet: there are no weights to begin with")
    which = "latest" if _best_saved_step(run) is None else "best"
    saved = own_checkpoint(run, which, warn)
    return saved.model, f"{found.name}, {'newest' if which == 'latest' else 'best'} checkpoint: step {saved.step}"


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bits; the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
