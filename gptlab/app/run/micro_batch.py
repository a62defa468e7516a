"""A micro-batch that fits into the device's memory: chosen by an estimate, and where the warm-up still runs out of
memory, the warm-up is repeated with half of the rows. A step has the same rows and the same mean loss, in more
micro-batches.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gptlab.app.run.run_request import RunRequest
from gptlab.app.run.session import Session
from gptlab.bench.plan import make_plan
from gptlab.config.load import config_to_json
from gptlab.config.run import RunConfig
from gptlab.runtime.hardware.device import forget_peak_memory
from gptlab.runtime.hardware.memory import fewer_micro_sequences, ran_out_of_memory
from gptlab.runtime.hardware.place import Place, place_of
from gptlab.runtime.processes.distributed import World
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import change_config

if TYPE_CHECKING:
    from gptlab.training.recorder import Recorder

FILLED = 0.95
"""Of the free memory. The rest is for blocks that PyTorch's allocator rounds up or cannot join: an assumption, since no
GPU has run this."""


def with_rows_that_fit(config: RunConfig, request: RunRequest, console: Console, world: World) -> RunConfig:
    """`config` with fewer rows in a micro-batch where one GPU has no room for the recipe's. A number that was asked for
    stays, and several processes begin with the recipe's."""
    if world.size > 1 or "batch.micro_sequences" in request.overrides:
        return config
    place = place_of(config, world)
    return rows_that_fit(config, place, console) if place.device.type == "cuda" else config


def rows_that_fit(config: RunConfig, place: Place, console: Console) -> RunConfig:
    """`config` with as many rows in a micro-batch as `gptlab plan` finds room for on this GPU: the recipe's, half of
    them, a quarter, ... One row is tried in any case."""
    if config.parallel.exact_any_world_size:  # whose bits depend on the rows
        return config
    try:
        return _planned(config, place, console)
    except Exception as error:  # of torch's private parts on a GPU that nobody tried: the warm-up finds what fits
        console.warn(f"memory was not planned ({type(error).__name__}: {error}); trying the recipe's rows")
        return config


def _planned(config: RunConfig, place: Place, console: Console) -> RunConfig:
    torch.cuda.empty_cache()  # torch keeps the memory of models whose steps were timed
    free, _ = torch.cuda.mem_get_info(place.device)
    uncompiled = replace(config, runtime=replace(config.runtime, compile="off"))
    if make_plan(uncompiled, place).memory_bytes <= FILLED * free:  # a fifth of the time that the graphs take
        return config
    rows = config.batch.micro_sequences
    while (needed := make_plan(config, place).memory_bytes) > FILLED * free and config.batch.micro_sequences > 1:
        fewer = fewer_micro_sequences(config.batch.micro_sequences)
        config = replace(config, batch=replace(config.batch, micro_sequences=fewer))
    console.line(
        f"memory    {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free, as planned with batch.micro_sequences = "
        f"{config.batch.micro_sequences}{f' instead of {rows}' * (rows != config.batch.micro_sequences)}"
    )
    return config


def until_it_fits(session: Session, record: Recorder, *, is_resumed: bool) -> None:
    """Repeat the warm-up with ever fewer rows until it has enough memory, and keep their number in the session's
    configuration, and in the run's unless it `is_resumed`, which writes it later.

    The error stays where the rows must not change (`parallel.exact_any_world_size`), where one row is too much, and
    where ranks compute together and one that fails leaves the others waiting.
    """
    fixed = session.config.parallel.exact_any_world_size or session.state.strategy.is_sharded
    while True:
        fits = True
        try:
            session.warm_up(record.console.warn)
        except Exception as error:
            if fixed or session.config.batch.micro_sequences == 1 or not ran_out_of_memory(error):
                raise
            fits = False
        if all(session.group.gather("micro-batch fits", fits)):
            return
        gc.collect()  # the frames of the error held its tensors
        if session.place.device.type == "cuda":
            torch.cuda.empty_cache()
            forget_peak_memory(session.place.device)
        _use_fewer_rows(session, record, is_resumed)


def _use_fewer_rows(session: Session, record: Recorder, is_resumed: bool) -> None:
    rows = session.config.batch.micro_sequences
    batch = replace(session.config.batch, micro_sequences=fewer_micro_sequences(rows))
    session.config = config = replace(session.config, batch=batch)
    session.state.loader.cut(batch.micro_sequences, config.micro_batches)
    if session.group.is_main and not is_resumed:
        change_config(record.run, record.run.read_config() | {"batch": config_to_json(config)["batch"]}, step=0)
        record.saves.about_run["run"] = record.run.identity(session.data.fingerprint)
    record.console.warn(
        f"out of memory with batch.micro_sequences = {rows}: now {batch.micro_sequences}, in {config.micro_batches} "
        "micro-batches a step, which has the same rows and the same mean loss"
    )
