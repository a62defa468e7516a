"""A trained run, loaded to be evaluated, sampled or exported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptlab.app.run.own_parts import OwnParts
from gptlab.app.run.ranks import rank_0_first, require_same_run
from gptlab.app.run.repeat import stored_config
from gptlab.app.run.saved_weights import own_checkpoint
from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.data.prepare import prepare
from gptlab.data.rows import validation_rows
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gptlab.data.tokens.shards import TokenSplit
from gptlab.eval.bits_per_byte import Evaluation, evaluate, nats_of, rows_of_pass
from gptlab.eval.core import CoreResult, encode_tasks, measure_core
from gptlab.eval.core_tasks import core_folder, find_bundle, read_tasks
from gptlab.lab.experiments.folder import has_stand_in, require_validation_text
from gptlab.model.gpt import GPT, build_model
from gptlab.model.kernels.ops import missing_kernels, multiply_by
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.hardware.cpu import cpu_model, set_threads
from gptlab.runtime.hardware.device import resolve_device, unused_gpu
from gptlab.runtime.hardware.place import resolve_dtype
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import edited_field, saved_identity
from gptlab.runtime.records.run_directory import RunDirectory, list_in
from gptlab.training.checkpoint.load import checksum, load_weights, require_weights_of


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
    path: str | os.PathLike[str],
    *,
    checkpoint: str | int = "latest",
    device: str | None = None,
    dtype: str | None = None,
    change_model: Callable[[GPT], None] | None = None,
    console: Console | None = None,
    group: Group | None = None,
) -> LoadedRun:
    """The run in `path` at `checkpoint` (latest | best | a step). `device`, `dtype`: None means as configured.
    `change_model`: the function that the run was trained with, if it had one.

    Warns on `console` (None: standard error) of damaged checkpoints, and of a GPU that torch cannot use. With several
    processes (`group`), all load the same weights and may use collectives afterwards. UserError where run, tokenizer,
    checkpoint or device cannot be used.
    """
    group, console = group or Group(), console or Console(stream=sys.stderr)
    directory = RunDirectory.open(Path(path).expanduser())
    own = OwnParts(change_model=change_model)
    for warning in own.require_those_of(directory.path, directory.recorded(), "load"):
        console.warn(warning)
    config = stored_config(directory)
    wanted = device or config.runtime.device
    if (unused := unused_gpu(wanted, config.runtime.allocator, group.world.local_rank)) is not None:
        console.warn(unused)
    where = resolve_device(wanted, None if group.size == 1 else group.world.local_rank)
    runtime = as_recorded(directory, config.runtime, where)
    compute_dtype = resolve_dtype(dtype or runtime.dtype, where)
    if not directory.checkpoints_path.is_dir():
        why = "it only validates" if config.eval.only else "the run has not reached its first one"
        raise UserError(f"{path} has no checkpoint yet: {why}")
    set_threads(config.runtime.threads)
    tokenizer = load_tokenizer(directory.tokenizer_path)
    if config.model.vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"{directory.tokenizer_path} has {tokenizer.vocab_size} entries, but the run's model has "
            f"{config.model.vocab_size}: this is not the tokenizer that it was trained with"
        )
    config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    saved = own_checkpoint(directory, str(checkpoint), console.warn, group)
    identity = saved_identity(saved.state, saved.path)
    if identity is not None and (edited := edited_field(directory, identity)) is not None:
        console.warn(f"{directory.config_path} was edited after {saved.path.name} was saved ({edited})")
    if change_model is None:
        require_weights_of(config.model, saved.model)
    model = build_model(config.model, device=where, compute_dtype=compute_dtype, seed=config.seed)
    if change_model is not None:
        from gptlab.model.changed import apply_change

        apply_change(model, change_model, config.seed, where)
    load_weights(model, saved.model)
    if config.data.mask_documents and tokenizer.bos_id is not None:
        model.mask_documents(tokenizer.bos_id)
    if (missing := missing_kernels(where, compute_dtype)) is not None:
        console.warn(missing)
    if runtime.products != "auto":
        multiply_by(runtime.products)
    group.start_collectives(where, timeout_seconds=config.runtime.process_timeout_seconds)
    if group.size > 1 and (different := group.all_agree(checksum(model.parameters()), "weights")):
        raise UserError(f"rank {different[0]} finds another checkpoint in {path} than rank 0: give all the same folder")
    return LoadedRun(directory, config, tokenizer, model.eval(), saved.step, where)


def as_recorded(run: RunDirectory, runtime: RuntimeConfig, device: torch.device) -> RuntimeConfig:
    """`runtime`; on a CPU, with the dtype and the products that a processor like this one computed the run in and by,
    where it says "auto": what that means is timed, and timed again could be another."""
    if device.type != "cpu":
        return runtime
    record, cpu = run.recorded(), cpu_model()
    found: dict[str, Any] = {}
    for process in (record, *list_in(record, "resumes")):
        match process:
            case {"device": "cpu", "cpu": str(its), "dtype": "float32" | "bfloat16" as dtype} if its == cpu:
                found.setdefault("dtype", dtype)
                match process.get("implementations"):
                    case {"products": "kernels" | "library" as products}:
                        found.setdefault("products", products)
    return replace(runtime, **{name: value for name, value in found.items() if getattr(runtime, name) == "auto"})


def core_of_run(
    run: LoadedRun,
    *,
    core_dir: str | None,
    examples: int | None,
    micro_sequences: int | None,
    console: Console,
    group: Group,
) -> CoreResult:
    """CORE of the loaded weights. None: as configured; 0 examples: all. UserError without a bundle."""
    config = run.config
    cache = cache_root(config.data.cache_dir)
    bundle = find_bundle(core_dir or config.eval.core_dir, cache)
    if bundle is None:
        raise UserError(
            f"no evaluation bundle in {core_folder(cache)}: `gptlab data prepare core` gets it, or give its --core-dir"
        )
    wanted = config.eval.core_examples if examples is None else examples or None
    tasks = encode_tasks(read_tasks(bundle, wanted), run.tokenizer, config.model.seq_len)
    questions = [question for task in tasks for question in task.questions][group.rank :: group.size]
    total_tokens = sum(len(option) for question in questions for option in question.options)
    with console.progress("CORE", total_tokens, "tokens") as progress:
        pass_tokens = (micro_sequences or rows_of_pass(config, run.device)) * config.model.seq_len
        return measure_core(run.model, tasks, max_pass_tokens=pass_tokens, advance=progress.advance, group=group)


def with_own_tokenizer(config: RunConfig, run: RunDirectory) -> RunConfig:
    """With the run's copy of its tokenizer, where that is intact. One that was read from elsewhere may be gone, and
    another version of gptlab or of its library may learn other merges from the same text."""
    if config.tokenizer.path is None and config.tokenizer.kind != "bpe":
        return config
    with suppress(UserError):
        if run.recorded().get("tokenizer_fingerprint") in (None, load_tokenizer(run.tokenizer_path).fingerprint):
            return replace(config, tokenizer=replace(config.tokenizer, path=str(run.tokenizer_path)))
    return config


def evaluate_run(
    run: LoadedRun,
    *,
    tokens: int | None = None,
    micro_sequences: int | None = None,
    console: Console,
    group: Group,
) -> Evaluation:
    """The loss on the validation set of the run's corpus, and on training text where that is configured. None: as
    configured.

    Warns where the corpus has changed since training. UserError where it cannot be read, or is a lab's, where training
    text stands in for what validates.
    """
    config = run.config
    require_validation_text(config.data)
    # The run's own tokenizer: one trained again on changed text would have other tokens.
    kept = replace(config.tokenizer, path=str(run.directory.tokenizer_path))
    with rank_0_first(group):
        prepared = prepare(config.data, kept, console=console)
    require_same_run(config, {"data_fingerprint": prepared.fingerprint}, group)
    trained_on = run.directory.recorded().get("data_fingerprint")
    of_a_lab = has_stand_in(stored_config(run.directory).data)  # its own tokens, not those of the corpus
    if trained_on not in (None, prepared.fingerprint) and not of_a_lab:
        corpus = ", ".join(config.data.source)
        if config.data.val_source:
            corpus += f", validated on {', '.join(config.data.val_source)},"
        console.warn(
            f"the corpus {corpus} is not what it was when this run was trained: the numbers do not compare with the "
            "run's own, and text that it was trained on may be among the validation text"
        )

    most_rows = micro_sequences or rows_of_pass(config, run.device)

    def measure(split: TokenSplit, max_tokens: int | None) -> Evaluation:
        rows = validation_rows(split, config.model.seq_len, run.tokenizer.bos_id, max_tokens)
        return evaluate(
            nats_of(run.model), rows, run.tokenizer.token_bytes, device=run.device,
            micro_sequences=min(most_rows, rows.rows_per_epoch), module=run.model, group=group,
        )  # fmt: skip

    result = measure(prepared.val, tokens or config.eval.tokens)
    if config.eval.train_tokens is None:
        return result
    return replace(result, train_loss=measure(prepared.train, config.eval.train_tokens).val_loss)
