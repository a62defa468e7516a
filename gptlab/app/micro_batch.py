"""A micro-batch that fits into the device's memory: where the warm-up runs out of it, the warm-up is repeated with half
of the rows. A step has the same rows and the same mean loss, in more micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gptlab.app.session import Session
from gptlab.config.load import config_to_json
from gptlab.runtime.hardware.memory import fewer_micro_sequences, ran_out_of_memory
from gptlab.runtime.records.run_directory import change_config, identity_of

if TYPE_CHECKING:
    from gptlab.training.recorder import Recorder


def until_it_fits(warm_up: Callable[[], float], session: Session, record: Recorder, *, step: int) -> float:
    """Repeat `warm_up` with ever fewer rows until it has enough memory, and keep their number in the run's
    configuration. Returns the seconds of all attempts. `step`: where the run continues.

    The error stays where the rows must not change (`parallel.exact_any_world_size`), where one row is too much, and
    where ranks compute together and one that fails leaves the others waiting.
    """
    seconds = 0.0
    fixed = session.config.parallel.exact_any_world_size or session.state.strategy.is_sharded
    while True:
        fits = True
        try:
            seconds += warm_up()
        except Exception as error:
            if fixed or session.config.batch.micro_sequences == 1 or not ran_out_of_memory(error):
                raise
            fits = False
        if all(session.group.gather("micro-batch fits", fits)):
            return seconds
        gc.collect()  # the frames of the error held its tensors
        if session.place.device.type == "cuda":
            torch.cuda.empty_cache()
        _use_fewer_rows(session, record, step)


def _use_fewer_rows(session: Session, record: Recorder, step: int) -> None:
    rows = session.config.batch.micro_sequences
    batch = replace(session.config.batch, micro_sequences=fewer_micro_sequences(rows))
    session.config = config = replace(session.config, batch=batch)
    session.state.loader.cut(batch.micro_sequences, config.micro_batches)
    if session.group.is_main:
        change_config(record.run, record.run.read_config() | {"batch": config_to_json(config)["batch"]}, step=step)
        record.saves.about_run["run"] = identity_of(record.run, session.data.fingerprint)
    record.console.warn(
        f"out of memory with batch.micro_sequences = {rows}: now {batch.micro_sequences}, in {config.micro_batches} "
        "micro-batches a step, which has the same rows and the same mean loss"
    )
