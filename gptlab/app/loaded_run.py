"""A trained run, ready to be asked: its configuration, tokenizer and model, from its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gptlab.app.own_parts import own_parts_of
from gptlab.app.repeat import recorded_facts
from gptlab.config.errors import UserError
from gptlab.config.load import config_from_json
from gptlab.config.run import RunConfig
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels.ops import missing_kernels
from gptlab.runtime.hardware.device import resolve_device, resolve_dtype
from gptlab.runtime.hardware.threads import set_threads
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import edited_field, require_own, saved_identity
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.directory import step_of
from gptlab.training.checkpoint.load import list_checkpoints, load_checkpoint, select_checkpoint
from gptlab.training.parallel.agreement import checksum, same_checkpoint
from gptlab.training.state import load_weights, require_weights_of


@dataclass(frozen=True, slots=True)
class LoadedRun:
    directory: RunDirectory
    config: RunConfig
    tokenizer: Tokenizer
    model: GPT
    """In evaluation mode, with the weights of `step`."""
    step: int
    device: torch.device


def load_run(
    path: str,
    *,
    checkpoint: str = "latest",
    device: str | None = None,
    dtype: str | None = None,
    console: Console,
    group: Group | None = None,
) -> LoadedRun:
    """The run in `path` at `checkpoint` (latest | best | a step); device and dtype: None means as configured.

    Damaged checkpoints are told to `console`. Of several processes (`group`) all have the same weights, and may speak
    in collectives from here on. UserError where run, tokenizer, checkpoint or device cannot be used.
    """
    group = group or Group()
    directory = RunDirectory.open(Path(path))
    if (change := own_parts_of(recorded_facts(directory)).get("change_model")) is not None:
        raise UserError(f"the model of {path} was changed by change_model={change['name']}, which only Python can call")
    config = config_from_json(directory.read_config())
    where = resolve_device(device or config.runtime.device, None if group.size == 1 else group.world.local_rank)
    compute_dtype = resolve_dtype(dtype or config.runtime.dtype, where)
    if not directory.checkpoints_path.is_dir():
        raise UserError(f"{path} has no checkpoint yet: the run has not reached its first one")
    set_threads(config.runtime.threads)
    tokenizer = load_tokenizer(directory.tokenizer_path)
    if config.model.vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"{directory.tokenizer_path} has {tokenizer.vocab_size} entries, but the run's model has "
            f"{config.model.vocab_size}: this is not the tokenizer that it was trained with"
        )
    config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    if checkpoint == "latest":
        saved = same_checkpoint(directory.checkpoints_path, group, console.warn)
    else:
        best = best_saved_step(directory) if checkpoint == "best" else None
        saved = load_checkpoint(select_checkpoint(directory.checkpoints_path, checkpoint, console.warn, best_step=best))
    identity = saved_identity(saved.state, saved.path)
    require_own(directory, identity, saved.path)
    if identity is not None and (edited := edited_field(directory, identity)) is not None:
        console.warn(f"{directory.config_path} was edited after {saved.path.name} was saved ({edited})")
    require_weights_of(config.model, saved.model)
    model = build_model(config.model, device=where, compute_dtype=compute_dtype, seed=config.seed)
    load_weights(model, saved.model)
    if (missing := missing_kernels(where, compute_dtype)) is not None:
        console.warn(missing)
    group.start_collectives(where, timeout_seconds=config.runtime.process_timeout_seconds)
    if group.size > 1 and (different := group.all_agree(checksum(model.parameters()), "weights")):
        raise UserError(f"rank {different[0]} finds another checkpoint in {path} than rank 0: give all the same folder")
    return LoadedRun(directory, config, tokenizer, model.eval(), saved.step, where)


def best_saved_step(directory: RunDirectory) -> int | None:
    """The step with the lowest recorded validation loss among those that a checkpoint stands for."""
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
