"""What the processes of tests/ranks/test_ranks.py do: commands of gptlab on several ranks, with something going wrong.

All ranks are forked from the test's process, where torch is imported already. Scenes are in lanes: those of a lane are
played one after another, the lanes at the same time, since most of a scene is waiting. A lane has as many processes as
its largest scene has ranks, and they play all of its scenes: a new process takes a tenth of a second of computing, most
of it to copy the pages that it writes to.

A lane of `jobs` has new processes for each scene. A scene there may be a job of several attempts, as torchrun makes
them: its store outlives the attempts, a rank that ends has the others told by SIGTERM, and they are all started again
as long as one of them failed. A rank that `lingers` takes so many seconds from the end of its command to that of its
process, as an interpreter that has torch to take down does. With `counts`, each rank is on a machine of its own, whose
torchrun has this restart count in each attempt.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_scenes import free_ports, freeze_libraries, hurry_meetings, store_note, wait_for_store
from forked import Forked
from torch import Tensor

from gptlab.app.run import run_session, session
from gptlab.cli.main import main
from gptlab.model.kernels import library, ops
from gptlab.runtime.hardware import place
from gptlab.runtime.records import provenance
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training import signals
from gptlab.training import step as step_module
from gptlab.training.checkpoint.load import checksum
from gptlab.training.parallel.agreement import Agreement
from gptlab.training.state import TrainState
from gptlab.training.step import Update

SCENE_SECONDS = 200.0


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, before: Callable[..., Any]) -> None:
    """`before` is called with the arguments of every call, in front of it."""
    work = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return work(*args, **kwargs)

    patch.setattr(owner, name, both)


def send(numbers: Sequence[str]) -> None:
    for number in numbers:
        os.kill(os.getpid(), signal.Signals[number])


PLACES: Mapping[str, tuple[Any, str]] = {
    "making the folder": (run_session, "make_run_directory"),
    "filling the folder": (RunDirectory, "write_files"),
    "making the data": (session, "prepare"),
    "warming up": (run_session, "_warm_up"),
}


def make_trouble(patch: pytest.MonkeyPatch, trouble: Mapping[str, Any]) -> None:
    """What goes wrong on this rank."""
    at = trouble.get("at")
    if trouble.get("in_a_hurry"):  # every further SIGINT counts, as if it came seconds later
        patch.setattr(signals, "_ECHO_SECONDS", 0.0)
    if at in PLACES:
        around(patch, *PLACES[at], lambda *args, **kwargs: send(trouble["signals"]))
    elif at is not None:
        for stopping in (signals.Signals, Agreement):
            around(patch, stopping, "step", lambda *args: send(trouble["signals"]) if args[-1] == at else None)
    if "data" in trouble:
        break_data(patch, **trouble["data"])
    if "code" in trouble:  # of another gptlab
        take = provenance.take_code
        patch.setattr(provenance, "take_code", lambda folder: take(Path(trouble["code"])))
    if "kernels" in trouble:  # that could not be built
        patch.setattr(library, "kernel_library", lambda activations: library.Library())
        patch.setattr(ops, "missing_kernels", lambda device, dtype: trouble["kernels"])
    if "backend" in trouble:  # of torch.compile
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=trouble["backend"]))
        around(patch, run_session, "fit", lambda *args: torch.compiler.set_stance("fail_on_recompile"))
    if "bfloat16 is faster" in trouble:  # as this rank times it
        patch.setattr(place, "_is_faster_in_bfloat16", lambda device: trouble["bfloat16 is faster"])
    if "corpus" in trouble:  # another text where rank 0 finds its own
        prepare = session.prepare

        def other(data: Any, *args: Any, **kwargs: Any) -> Any:
            return prepare(replace(data, source=(trouble["corpus"],)), *args, **kwargs)

        patch.setattr(session, "prepare", other)


def break_data(patch: pytest.MonkeyPatch, steps: Sequence[int], what: str, factor: float = float("nan")) -> None:
    """The data of `steps` multiplies the `loss` or the `gradient` of this rank, or that of the last `matrix`, which one
    rank owns; `nothing`: it is not looked at."""
    gradients = step_module.gradients

    def broken(state: TrainState, batch: Any, loss_sum: Any, *rest: Any) -> Tensor:
        if batch.step not in steps:
            return gradients(state, batch, loss_sum, *rest)
        if what == "nothing":
            return next(state.model.parameters()).new_tensor(float("nan"))

        def loss(*args: Tensor) -> Tensor:
            value = loss_sum(*args)
            if what == "gradient":
                value.register_hook(lambda gradient: gradient * factor)
            return value * factor if what == "loss" else value

        if what == "matrix":
            matrix = [parameter for parameter in state.model.blocks.parameters() if parameter.ndim == 2][-1]
            hook = matrix.register_hook(lambda gradient: gradient * factor)
            try:
                return gradients(state, batch, loss, *rest)
            finally:
                hook.remove()
        return gradients(state, batch, loss, *rest)

    patch.setattr(step_module, "gradients", broken)


def play(scene: Mapping[str, Any], rank: int, attempt: int) -> dict[str, Any]:
    """One command on one rank: what it printed, how it ended, weights and its moments after every update."""
    weights: list[int] = []
    moments: list[int] = []
    update = step_module.update

    def noting_update(state: TrainState, *args: Any) -> Any:
        done = update(state, *args)
        if isinstance(done, Update):
            weights.append(checksum(state.model.parameters()))
            moments.append(checksum(state.optimizer.state_tensors().values()))
        return done

    troubles = scene.get("trouble", [{}])
    os.chdir(scene["folder"])
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "update", noting_update)
        make_trouble(patch, troubles[attempt].get(str(rank), {}) if attempt < len(troubles) else {})
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(scene["argv"].get(str(rank), scene["argv"]["0"]))
    time.sleep(scene.get("lingers", {}).get(str(rank), 0.0))
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "weights": weights, "moments": moments}


def play_rank(folder: Path, scene: Mapping[str, Any], rank: int, attempt: int, port: int, *, job: bool) -> int:
    """Leaves SCENE-ATTEMPT-RANK.json when the command comes to its end. Its exit code."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": scene["ranks"], "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": job, "TORCHELASTIC_RESTART_COUNT": attempt}
    if "counts" in scene:
        world |= {"GROUP_RANK": rank, "TORCHELASTIC_RESTART_COUNT": scene["counts"][rank][attempt]}
    os.environ |= {name: str(value) for name, value in world.items()}
    if rank > 0 or job:
        wait_for_store(folder, port, folder / f"{scene['name']}-{attempt}-0.json")
    played = play(scene, rank, attempt)
    (folder / f"{scene['name']}-{attempt}-{rank}.json").write_text(json.dumps(played))
    return played["code"]


def play_lane(folder: Path, scenes: Sequence[Mapping[str, Any]], ports: Sequence[int], rank: int) -> None:
    """All scenes in which there is such a rank."""
    for scene, port in zip(scenes, ports, strict=True):
        if rank == 0:  # the others wait for its store
            for name, files in scene.get("copies", {}).items():
                damaged_copy(folder / "saved", folder / name, files)
        if rank < scene["ranks"]:
            play_rank(folder, scene, rank, 0, port, job=False)
        if dist.is_initialized():  # left by an error, to the end of the process
            dist.destroy_process_group()


def start(work: Callable[[], int | None]) -> int:
    """The number of a process that ends with this exit code."""
    if (pid := os.fork()) != 0:
        return pid
    code = 99
    try:
        code = work() or 0
    finally:
        os._exit(code)


def damaged_copy(run: Path, copy: Path, files: Sequence[str]) -> None:
    """A run folder once more, with a bit of these files of its checkpoints turned round."""
    shutil.copytree(run, copy)
    for name in files:
        path = copy / "checkpoints" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def run_attempt(folder: Path, scene: Mapping[str, Any], attempt: int, port: int) -> list[int]:
    """Exit codes by rank; -9 for a rank that was killed."""
    job = "attempts" in scene
    pids = [
        start(functools.partial(play_rank, folder, scene, rank, attempt, port, job=job))
        for rank in range(scene["ranks"])
    ]
    codes: dict[int, int] = {}
    until, told = time.monotonic() + SCENE_SECONDS, False
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            ended, status = (0, 0) if rank in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if job and not told and any(codes.values()):  # as torchrun does
            told = True
            for rank in set(range(len(pids))) - codes.keys():
                os.kill(pids[rank], signal.SIGTERM)
        if time.monotonic() > until:
            for rank in set(range(len(pids))) - codes.keys():
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.02)
    return [codes[rank] for rank in range(len(pids))]


def play_jobs(folder: Path, scenes: Sequence[Mapping[str, Any]], ports: Sequence[int]) -> None:
    for scene, port in zip(scenes, ports, strict=True):
        play_job(folder, scene, port)


def play_job(folder: Path, scene: Mapping[str, Any], port: int) -> None:
    """Leaves SCENE.json: the exit codes by attempt and rank."""
    store = None
    if "attempts" in scene and (store := os.fork()) == 0:
        kept = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        store_note(folder, port).touch()
        while kept is not None:
            time.sleep(1.0)
    codes = []
    while not codes or (any(codes[-1]) and len(codes) < scene.get("attempts", 1)):
        codes.append(run_attempt(folder, scene, len(codes), port))
    if store is not None:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    (folder / f"{scene['name']}.json").write_text(json.dumps(codes))


def play_lanes(folder: Path, lanes: dict[str, list[Any]]) -> None:
    """Plays them in processes of this one's, the commands of the lane "first" before all others. Lanes of jobs have
    names that end in "jobs"."""
    (folder / "scenes.json").write_text(json.dumps(lanes))
    importlib.import_module("torch._dynamo.backends.debugging")  # all that torch.compile imports
    process = Forked(lambda: _direct(folder), GLOO_SOCKET_IFNAME="lo")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output


def _direct(folder: Path) -> None:
    lanes = json.loads((folder / "scenes.json").read_text())
    hurry_meetings(folder)
    ports = iter(free_ports(sum(map(len, lanes.values()))))  # before a run seeds what draws them
    # Before the processes part, so that what is found out once (the machine's speed) is found out once.
    for argv in lanes.pop("first"):
        assert main(argv) == 0
    freeze_libraries()
    children = []
    for name, lane in lanes.items():
        parts = folder, lane, list(itertools.islice(ports, len(lane)))
        if name.endswith("jobs"):
            children.append(start(functools.partial(play_jobs, *parts)))
        else:
            ranks = range(max(scene["ranks"] for scene in lane))
            children += [start(functools.partial(play_lane, *parts, rank)) for rank in ranks]
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
