"""What the processes of tests/ranks/test_saving.py do: runs in which one of several
ranks is slow to save, or cannot."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from distributed_scenes import play

from gptlab.training import step as step_module
from gptlab.training.checkpoint import background
from gptlab.training.checkpoint.write import step_of_temporary
from gptlab.training.state import TrainState


def noting(wait: Callable[..., None], step: int, note: Path) -> Callable[..., None]:
    """`wait`, which notes that training waits for the save of this step."""

    def noting_wait(saves: background.ConcurrentSaver, state: TrainState) -> None:
        if saves.pending is not None and saves.pending.request.step == step:
            note.touch()
        wait(saves, state)

    return noting_wait


def harmed(call: Callable[..., Any], harm: dict[str, Any], rank: int) -> Callable[..., Any]:
    """`begin_save`, `write_part` or `complete_save`, on the rank and for the steps that `harm` names."""

    def harmed_call(temporary: Path, *args: Any, **keywords: Any) -> Any:
        step = step_of_temporary(temporary) if temporary.name.startswith(".") else args[0]
        if rank != harm["rank"] or step not in harm["steps"]:
            return call(temporary, *args, **keywords)
        while harm["how"] == "waited for" and not Path(harm["note"]).exists():
            time.sleep(0.01)
        if harm["how"] in ("slow", "waited for"):
            time.sleep(harm.get("seconds", 0.3))
            return call(temporary, *args, **keywords)
        if harm["how"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        real = getattr(os, harm["call"])

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(os, harm["call"], refuse)
        try:
            return call(temporary, *args, **keywords)
        finally:
            setattr(os, harm["call"], real)

    return harmed_call


def spiked(factor: float, at: int) -> Callable[..., Any]:
    """`gradients`, with the loss of all ranks grown in the step that takes the data of step `at`."""
    real = step_module.gradients

    def gradients(state: Any, batch: Any, *args: Any) -> Any:
        loss = real(state, batch, *args)
        return loss * factor if batch.step == at else loss

    return gradients


def play_harmed(scene: dict[str, Any], port: int, rank: int) -> dict[str, Any]:
    originals = background.begin_save, background.write_part, background.complete_save, step_module.gradients
    wait = background.ConcurrentSaver.wait
    for harm in scene.get("harms", []):
        if harm["how"] == "waited for" and rank == 0:
            background.ConcurrentSaver.wait = noting(wait, harm["steps"][0], Path(harm["note"]))  # type: ignore[method-assign]
    for harm in scene.get("harms", []):
        name = harm.get("where", "write_part")
        setattr(background, name, harmed(getattr(background, name), harm, rank))
    if "spike" in scene:
        step_module.gradients = spiked(50.0, scene["spike"])
    try:
        return play(scene, port, rank)
    finally:
        background.begin_save, background.write_part, background.complete_save, step_module.gradients = originals
        background.ConcurrentSaver.wait = wait  # type: ignore[method-assign]
        if dist.is_initialized():  # which a run that failed leaves to the end of its process
            dist.destroy_process_group()
