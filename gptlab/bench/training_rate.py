"""How fast this machine trains a configuration: real steps, timed after compiling, and kept for `gptlab plan`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig
from gptlab.config.scaling import Machine
from gptlab.data.tokenizer.gpt2 import VOCAB_SIZE as GPT2_VOCAB_SIZE
from gptlab.data.tokenizer.tokenizer import load_tokenizer
from gptlab.model.counting import flops_per_token
from gptlab.model.gpt import GPT
from gptlab.runtime.files.cache import cache_root, keep_json
from gptlab.runtime.files.plain_file import json_sha256, read_json_object
from gptlab.runtime.hardware.device import device_name
from gptlab.runtime.hardware.place import Place, place_of
from gptlab.runtime.processes.distributed import ALONE, World

# Steps of quickstart reach 0.55 of the products' peak where these are slow (float32 with AVX2, docs/LOG.md, 2026-11-22)
# and a third of it where they are fast (AMX), since the rest of a step is no faster there: two threads reach 490 to 530
# GFLOP/s with products of 842 to 966 (Zen 5, 2026-11-25 and 2026-11-27) and 545 to 740 with products of 2,000 (AMX,
# 2026-11-29).
PRODUCTS_SHARE = 0.55
CPU_THREAD_FLOPS_PER_SECOND = 340e9

ASSUMED_CHARACTERS = 128
"""A char tokenizer's entries before the corpus is read: ASCII. (tinyshakespeare has 65.)"""

STDLIB_TOKENS = 8_600_000
"""Training tokens of `stdlib` in quickstart's vocabulary, about: each Python has its own (README: 8,640,364)."""

# Eight steps of quickstart's default size on two cores: one slow step does not move their median.
TIMED_SECONDS = 3.0
TIMED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one configuration's steps on this machine, in one process."""

    tokens_per_second: float
    flops_per_second: float
    """Forward and backward, as in MFU."""
    tokens_per_step: int
    """Of the steps that were timed. A step has one update, so that a token takes less time in a larger one."""
    date: str
    """When they were timed: YYYY-MM-DD, UTC."""


def timed_machine(config: RunConfig, world: World, warn: Callable[[str], None], show: Callable[[str], None]) -> Machine:
    """This machine, timed on the steps of `config`. What it compiles, the run that follows finds in the cache.
    UserError where the steps cannot run."""
    place = place_of(config, world)
    rate = time_rate(config, place, warn, show)
    return machine_at(config, place, world, world.size * rate.flops_per_second)


def limited_machine(config: RunConfig, world: World = ALONE) -> Machine:
    """This machine with the most FLOP/s that its steps can reach. Half a second on a CPU, once in a process."""
    place = place_of(config, world)
    peak = _best_peak(place)
    machine = machine_at(config, place, world, None)
    if peak is None:
        return machine
    of_threads = CPU_THREAD_FLOPS_PER_SECOND * place.threads if place.device.type == "cpu" else math.inf
    return replace(machine, most_flops_per_second=world.size * min(PRODUCTS_SHARE * peak, of_threads))


def machine_at(config: RunConfig, place: Place, world: World, flops_per_second: float | None) -> Machine:
    """This machine at a rate, with the tokens of the text as far as they are known before it is read."""
    return Machine(
        device=str(place.device),
        flops_per_second=flops_per_second,
        training_tokens=STDLIB_TOKENS if config.data.source == ("stdlib",) else None,
        processes=world.size,
    )


def time_rate(config: RunConfig, place: Place, warn: Callable[[str], None], show: Callable[[str], None]) -> Rate:
    """The median step of TIMED_SECONDS at most, at least three steps, on random tokens. The model is discarded.

    A step has at most two micro-batches here, so that timing a large batch takes no longer; with more of them per
    update, training is slightly faster.
    """
    from gptlab.bench.timing import made_up_run, time_steps
    from gptlab.runtime.hardware.memory import memory_errors_explained, what_to_lower
    from gptlab.training.compilation import warm_up
    from gptlab.training.faults import TrainingFailed

    config = replace(config, model=replace(config.model, vocab_size=assumed_vocab_size(config)[0]))
    tokens = min(config.batch.total_tokens, 2 * config.micro_tokens)
    short = replace(config, batch=replace(config.batch, total_tokens=tokens))
    with memory_errors_explained(lambda error: what_to_lower(error, config, None)):
        state, passes = made_up_run(short, place, warn)
        with state.loader:
            show("compiling, to time the steps that the size follows from" if passes.compiled else "timing steps")
            warm_up(state, passes, short, config.eval_sequences, warn)
            show("timing steps")
            try:
                seconds = time_steps(
                    state, passes.loss_sum, short, max_steps=TIMED_STEPS, max_seconds=TIMED_SECONDS,
                    min_steps=3, by_parts=False, until_alike=True,
                ).whole_seconds  # fmt: skip
            except TrainingFailed as error:
                raise UserError(f"the steps of this configuration cannot be timed: {error}") from None
    rate = seen_rate(tokens, statistics.median(seconds), state.model)
    remember_rate(config, place, rate)
    return rate


def seen_rate(tokens_per_step: int, step_seconds: float, model: GPT) -> Rate:
    """Today's rate of `model`."""
    tokens_per_second = tokens_per_step / step_seconds
    flops_per_second = tokens_per_second * flops_per_token(model).total
    return Rate(tokens_per_second, flops_per_second, tokens_per_step, f"{datetime.now(UTC):%Y-%m-%d}")


def remember_rate(config: RunConfig, place: Place, rate: Rate) -> None:
    """Keep the rate in the user's cache. Where that cannot be written, only `plan` lacks an answer."""
    keep_json(_rate_path(config, place), dataclasses.asdict(rate))


def remembered_rate(config: RunConfig, place: Place) -> Rate | None:
    """The last rate at which this machine trained `config`'s model and micro-batches, however many were in a step; None
    where it never did."""
    path = _rate_path(config, place)
    try:
        found = read_json_object(path)
    except UserError:
        return None
    tokens, flops, step, date = (found.get(field.name) for field in dataclasses.fields(Rate))
    if not (isinstance(tokens, float) and isinstance(flops, float) and isinstance(step, int)):
        return None
    return Rate(tokens, flops, step, str(date)) if min(tokens, flops, step) > 0 else None


def _best_peak(place: Place) -> float | None:
    """The highest peak FLOP/s that was measured of this device, kept like rates: the sizes that `bench` times are those
    that `plan` looks up, even if another program was running during one of them. None: unknown."""
    now = place.peak.flops_per_second
    if now is None:
        return None
    path = _path_of({"peak of": [device_name(place.device), str(place.dtype), place.threads]})
    try:
        before = read_json_object(path).get("flops_per_second")
    except UserError:
        before = None
    if isinstance(before, float) and before >= now:
        return before
    keep_json(path, {"flops_per_second": now})
    return now


def _rate_path(config: RunConfig, place: Place) -> Path:
    """One file for what decides the speed of a step: machine, model, micro-batch, optimizer. Not how many micro-batches
    it has: `time_rate` times two at most, and how many are trained follows from their rate."""
    model, runtime = replace(config.model, vocab_size=assumed_vocab_size(config)[0]), config.runtime
    facts = {
        "device": device_name(place.device),
        "threads": place.threads,
        "dtype": str(place.dtype),
        "runtime": [runtime.compile, runtime.products, runtime.activation_checkpointing, runtime.fp8],
        "model": dataclasses.asdict(model),
        "micro_sequences": config.batch.micro_sequences,
        "mask_documents": config.data.mask_documents,
        "matrix_optimizer": config.optim.matrix_optimizer,
        "orthogonalizer": [config.optim.muon.orthogonalizer, config.optim.muon.iterations],
        "exact_any_world_size": config.parallel.exact_any_world_size,
    }
    return _path_of(facts)


def _path_of(facts: dict[str, object]) -> Path:
    return cache_root(None) / "training-rates" / f"{json_sha256(facts)[:16]}.json"


def assumed_vocab_size(config: RunConfig) -> tuple[int, str]:
    """(entries, source of the number), from what is known before any text is read."""
    tokenizer = config.tokenizer
    if config.model.vocab_size is not None:
        return config.model.vocab_size, "model.vocab_size"
    if tokenizer.path is not None:
        return load_tokenizer(Path(tokenizer.path)).vocab_size, f"the tokenizer in {tokenizer.path}"
    if tokenizer.kind == "gpt2":
        return GPT2_VOCAB_SIZE, "GPT-2's vocabulary"
    if tokenizer.kind == "byte":
        return 257, "256 bytes and BOS"
    if tokenizer.kind == "char":
        return ASSUMED_CHARACTERS, "assumed: the characters of ASCII"
    return tokenizer.vocab_size, "tokenizer.vocab_size, if the text gives that many"
