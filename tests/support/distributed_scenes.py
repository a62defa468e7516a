"""What the processes of some tests do: commands of gptlab one after another, each in its own world.

They are forked from the test's process, where torch is imported already, and all worlds are made of the same ones, as
many as the largest has ranks: where a scene has fewer, the rest wait for the next one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import math
import os
import pkgutil
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from torch import Tensor

import gptlab.training.compilation  # noqa: F401 -- before `gradients` is replaced: its warm-up keeps the real ones
from gptlab.cli.main import main
from gptlab.data.loader import StepBatch
from gptlab.model.gpt import GPT
from gptlab.optim import muon
from gptlab.runtime.processes import torch_group
from gptlab.runtime.processes.distributed import World
from gptlab.training import queued_steps
from gptlab.training import step as step_module
from gptlab.training.checkpoint.load import checksum
from gptlab.training.parallel.agreement import Agreement
from gptlab.training.parallel.zero import Zero
from gptlab.training.signals import Signals
from gptlab.training.state import TrainState
from gptlab.training.step import LossFunction


def play(scene: dict[str, Any], port: int, rank: int) -> dict[str, Any]:
    """One command on one rank: what it printed, how it ended, and its weights after every update."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": scene["ranks"], "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in (world | {"MASTER_PORT": port}).items()}
    weights: list[int] = []
    matrices: list[int] = []
    stopping = Agreement if scene["ranks"] > 1 else Signals
    gradients, step, orthogonalize = step_module.gradients, stopping.step, muon.orthogonalize

    def broken_gradients(state: TrainState, batch: StepBatch, loss_sum: LossFunction, *rest: Any) -> Tensor:
        what, wanted_rank, wanted_step = scene.get("in_pass", ("", -1, 0))
        if (wanted_rank, wanted_step) != (rank, state.step + 1):
            return gradients(state, batch, loss_sum, *rest)

        def broken_loss(*args: Tensor) -> Tensor:
            if what != "nan":
                os.kill(os.getpid(), signal.Signals[what])
            loss = loss_sum(*args)
            loss.register_hook(lambda gradient: gradient * math.nan)
            return loss

        return gradients(state, batch, broken_loss, *rest)

    def noting(update: Callable[..., Any]) -> Callable[..., Any]:
        def noting_update(state: TrainState, *args: Any) -> Any:
            done = update(state, *args)
            # Sharded moments differ from rank to rank.
            moments = [] if isinstance(state.strategy, Zero) else state.optimizer.state_tensors().values()
            weights.append(checksum([*state.strategy.replicated_weights(), *moments]))
            return done

        return noting_update

    def queued(model: GPT, *args: Any, **kwargs: Any) -> None:
        make_model(model, *args, **kwargs)
        model.platform = "cuda"

    def counting(stack: Tensor, *args: Any, **options: Any) -> Tensor:
        matrices.append(len(stack))
        return orthogonalize(stack, *args, **options)

    def signalled_step(agreed: Any, step_seconds: float, at: int) -> float:
        number, wanted_rank, wanted_step = scene.get("signal", ("SIGTERM", -1, 0))
        if (wanted_rank, wanted_step) == (rank, at):
            os.kill(os.getpid(), signal.Signals[number])
        return step(agreed, step_seconds, at)

    out, err, make_model = io.StringIO(), io.StringIO(), GPT.__init__
    with pytest.MonkeyPatch.context() as patch:
        if "compiler" in scene:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend=scene["compiler"]))
        if scene.get("queued"):  # the loop takes the path of a GPU
            patch.setattr(GPT, "__init__", queued)
        # A forked process has none of OpenMP's threads, and would wait for them for ever if the first one had some.
        patch.setattr(torch, "set_num_threads", lambda n: patch.setattr(torch, "get_num_threads", lambda: n))
        patch.setattr(stopping, "step", signalled_step)
        patch.setattr(muon, "orthogonalize", counting)
        patch.setattr(step_module, "update", noting(step_module.update))
        patch.setattr(queued_steps, "queued_update", noting(queued_steps.queued_update))
        for module in (step_module, queued_steps):
            patch.setattr(module, "gradients", broken_gradients)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*scene["argv"], *scene.get("more", {}).get(str(rank), [])])
    return {
        "code": code, "out": out.getvalue(), "err": err.getvalue(), "weights": weights, "matrices": sum(matrices),
        "left_a_group": torch.distributed.is_initialized(),
    }  # fmt: skip


def free_ports(n: int) -> list[int]:
    """Below those that Linux gives away by itself (32768 on): gloo's own sockets, and whatever else runs here, would
    take one of a later scene now and then. And so would the other test processes, which have ports of their own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    found: list[int] = []
    for port in random.sample(range(20_000 + worker % 4, 32_000, 4), 1_000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == n:
            break
    return found


def hurry_meetings(folder: Path) -> None:
    """To be called before ranks are forked: they look for messages more often, and rank 0 notes that it keeps the store
    of its world, for `wait_for_store`."""
    torch_group._LATER_LOOK_SECONDS = 0.02
    stores = torch_group._stores

    def noting_stores(world: World, hosts: bool) -> tuple[Any, ...]:
        opened = stores(world, hosts)
        if hosts:
            store_note(folder, int(os.environ["MASTER_PORT"])).touch()
        return opened

    torch_group._stores = noting_stores


def store_note(folder: Path, port: int) -> Path:
    return folder / f"store-{port}"


def wait_for_store(folder: Path, port: int, ended: Path) -> None:
    """Until there is a store at this port, or rank 0 has ended without (then there is `ended`). A rank that asks for it
    too early asks again half a second later."""
    while not store_note(folder, port).exists() and not ended.exists():
        time.sleep(0.005)


def play_all(folder: Path, scenes: list[dict[str, Any]], ports: list[int], rank: int) -> None:
    """A scene's `play` names another function that does it."""
    for scene, port in zip(scenes, ports, strict=True):
        if rank < scene["ranks"]:
            if rank > 0:
                wait_for_store(folder, port, folder / f"{scene['name']}-0.json")
            play_it = pkgutil.resolve_name(scene["play"]) if "play" in scene else play
            played = play_it(scene, port, rank)
            (folder / f"{scene['name']}-{rank}.json").write_text(json.dumps(played))


def freeze_libraries() -> None:
    """Keep what is imported out of the garbage collector for good, also in processes that are forked from this one.

    Each run collects garbage before its first step. With all of torch in memory, that takes half a second.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def wait_for_all(pids: list[int]) -> list[int]:
    """Exit codes. A process that stopped itself is killed when the others have ended."""
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if stopped and len(codes) + len(stopped) == len(pids):
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def play_scenes(folder: Path, scenes: list[dict[str, Any]], imports: Sequence[str] = ()) -> str:
    """Plays them in processes of this one's, which leave SCENE-RANK.json there. What the processes themselves said, and
    as the last line their exit codes by rank. `imports`: modules that some scenes need and that take seconds."""
    (folder / "scenes.json").write_text(json.dumps(scenes, default=str))
    for name in imports:  # here, where later tests find them too
        importlib.import_module(name)
    process = Forked(lambda: _direct(folder), GLOO_SOCKET_IFNAME="lo")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def _direct(folder: Path) -> None:
    scenes = json.loads((folder / "scenes.json").read_text())
    hurry_meetings(folder)
    ports = free_ports(len(scenes))
    # Before the processes part, so that what is found out once (the machine's speed) is found out once.
    assert scenes[0]["ranks"] == 1
    play_all(folder, scenes[:1], ports[:1], 0)
    freeze_libraries()
    children = []
    for rank in range(max(scene["ranks"] for scene in scenes)):
        if (pid := os.fork()) == 0:
            play_all(folder, scenes[1:], ports[1:], rank)
            os._exit(0)
        children.append(pid)
    print("CODES", wait_for_all(children), flush=True)
