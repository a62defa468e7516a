"""Several processes: the same run at every world size, one decision for all ranks, and nobody left hanging."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_scenes import play_scenes
from tiny_runs import CLOCK_FIELDS, arguments, lines_of
from torch import Tensor

from gptlab.app.run.ranks import together
from gptlab.config.errors import UserError
from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.runtime.hardware.place import place_of
from gptlab.runtime.processes.distributed import Group, World, apart
from gptlab.runtime.processes.liveness import Failure, Liveness, PeerFailed
from gptlab.runtime.processes.torch_group import TorchGroup, _stores, join_others
from gptlab.runtime.records.metrics import read_metrics
from gptlab.training.checkpoint.load import checksum, load_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")

FLAGS = {
    "model.n_layer": 2, "steps": 4, "batch.total_tokens": 4 * 4 * 32, "eval.every_steps": 2,
    "eval.at_start": False, "eval.micro_sequences": 4, "checkpoint.every_steps": None, "sample.every_steps": None,
    "runtime.dtype": "float64",
}  # fmt: skip
"""Four micro-batches a step: 3 ranks take 2, 1 and 1 of them. Dropout is on, gradients are clipped. In float64, since
Adam's first steps make a whole step of the sign of a gradient that is only rounding."""

# Gradients are the same numbers added in another order: float64 rounds at 1e-16, of which divisions by small moments
# make more. Another micro-batch, or other dropout, moves a loss by 1e-2.
TOLERANCE = 1e-9
"""Relative for losses and norms, absolute too for weights and moments."""


def scenes(folder: Path) -> list[dict[str, Any]]:
    def train(name: str, ranks: int, **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {field.replace("__", "."): value for field, value in changes.items()}
        return {"name": name, "ranks": ranks, "argv": ["train", *arguments(folder, name, flags)]}

    core = {"eval__core_every_steps": 4, "eval__core_dir": folder / "bundle"}
    few = {"batch__total_tokens": 3 * 4 * 32, "model__n_layer": 1, "optim__muon__split_qkv": "false", "steps": 2}
    resume = {"argv": ["train", "--resume", str(folder / "stopped")]}
    return [
        train("one", 1, **core),
        train("three", 3, **core),
        train("few-one", 1, **few),
        train("few-six", 6, **few) | {"queued": True},
        train("stopped", 2, **core) | {"signal": ["SIGTERM", 1, 1]},
        {"name": "resumed", "ranks": 3, "signal": ["SIGINT", 2, 3], **resume},
        {"name": "ended", "ranks": 1, **resume},
        {"name": "again", "ranks": 2, **resume},
        train("unlike", 2) | {"more": {"1": ["--seed", "7"]}},
        train("mixed", 2) | {"more": {"1": ["--resume", str(folder / "one")]}},
        # The last one: its processes do not come back.
        train("hung", 3, runtime__process_timeout_seconds=2) | {"signal": ["SIGSTOP", 2, 2]},
    ]


@pytest.fixture(scope="module")
def played(folder: Path) -> Path:
    """The folder, when all scenes have been played in it; what the processes themselves said is in output.txt."""
    (folder / "output.txt").write_text(play_scenes(folder, scenes(folder)))
    return folder


def of(folder: Path, scene: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{scene}-{rank}.json").read_text())


def assert_same_run(run: Path, other: Path) -> None:
    """The same lines, weights and moments to within the order of additions."""
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (run, other))
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    for line, its in zip(ours, theirs, strict=True):
        for name in line.keys() - CLOCK_FIELDS:
            expected = its[name]
            close = pytest.approx(expected, rel=TOLERANCE) if isinstance(expected, float) else expected
            assert line[name] == close, name
    last, its_last = (load_checkpoint(list_checkpoints(path / "checkpoints")[-1]) for path in (run, other))
    for name, tensor in (last.model | last.optimizer).items():
        its_tensor = (its_last.model | its_last.optimizer)[name]
        torch.testing.assert_close(tensor, its_tensor, rtol=TOLERANCE, atol=TOLERANCE)


class TestWorldSizes:
    def test_train_the_same_run(self, played: Path) -> None:
        """Three, between which four micro-batches do not divide. Two and three resume it below."""
        assert_same_run(played / "three", played / "one")

    def test_more_ranks_than_micro_batches_and_than_matrices(self, played: Path) -> None:
        """Of those three, and of these, in one layer, four and the gate of its value embedding."""
        assert_same_run(played / "few-six", played / "few-one")

    @pytest.mark.parametrize(("name", "ranks"), [("three", 3), ("few-six", 6)])
    def test_all_ranks_hold_the_same_bits_behind_every_update(self, played: Path, name: str, ranks: int) -> None:
        main = of(played, name, 0)["weights"]
        assert len(set(main)) == len(main) == (2 if name == "few-six" else 4)
        for rank in range(1, ranks):
            assert of(played, name, rank)["weights"] == main

    def test_each_matrix_is_orthogonalized_once_in_the_world(self, played: Path) -> None:
        counts = [of(played, "three", rank)["matrices"] for rank in range(3)]
        # Four steps, and one to warm up.
        everything = of(played, "one", 0)["matrices"]
        assert sum(counts) == everything
        assert max(counts) <= -(-everything // (5 * 3)) * 5

    def test_evaluation_and_core_are_those_of_one_process(self, played: Path) -> None:
        """At step 0 the weights are the same bits, so that only the order of float64 sums is left."""
        (first, *_), (shared, *_) = (lines_of(played / name, "eval") for name in ("one", "three"))
        for figure in ("val_loss", "val_bpb"):
            assert shared[figure] == pytest.approx(first[figure], rel=1e-12)
        assert lines_of(played / "three", "core")[-1]["tasks"] == lines_of(played / "one", "core")[-1]["tasks"]

    def test_only_rank_0_speaks_and_writes(self, played: Path) -> None:
        assert "step 00004" in of(played, "three", 0)["out"]
        for rank in (1, 2):
            assert (of(played, "three", rank)["out"], of(played, "three", rank)["err"]) == ("", "")
        facts = json.loads((played / "three" / "run.json").read_text())
        assert (facts["world_size"], facts["status"]) == (3, "finished")
        assert [line["step"] for line in lines_of(played / "three", "train")] == [1, 2, 3, 4]


class TestStopping:
    def test_a_signal_to_one_rank_stops_all_at_one_step(self, played: Path) -> None:
        assert [of(played, "stopped", rank)["code"] for rank in range(2)] == [75, 75]
        assert "SIGTERM (rank 1): stopped after step 1, saved" in of(played, "stopped", 0)["out"]
        assert [len(of(played, "stopped", rank)["weights"]) for rank in range(2)] == [1, 1]

    def test_the_run_goes_on_with_3_ranks_and_ends_with_1(self, played: Path) -> None:
        assert [of(played, "resumed", rank)["code"] for rank in range(3)] == [75, 75, 75]
        assert of(played, "ended", 0)["code"] == 0
        assert_same_run(played / "stopped", played / "one")
        record = json.loads((played / "stopped" / "run.json").read_text())
        assert [record["world_size"], *(resume["world_size"] for resume in record["resumes"])] == [2, 3, 1]

    def test_a_finished_run_is_left_alone(self, played: Path) -> None:
        assert [of(played, "again", rank)["code"] for rank in range(2)] == [0, 0]
        assert "is finished" in of(played, "again", 0)["out"]


class TestDisagreement:
    def test_another_configuration_is_refused(self, played: Path) -> None:
        assert [of(played, "unlike", rank)["code"] for rank in range(2)] == [2, 2]
        said = of(played, "unlike", 0)["err"]
        error = "gptlab: error: rank 1's configuration differs from rank 0's (seed = 7"
        assert said.splitlines()[-1].startswith(error)
        assert of(played, "unlike", 1)["err"] == ""
        assert not (played / "unlike").exists()

    def test_another_command_is_refused(self, played: Path) -> None:
        assert {of(played, "mixed", rank)["code"] for rank in range(2)} == {2}
        said = of(played, "mixed", 0)["err"] + of(played, "mixed", 1)["err"]
        assert "must be started by the same command" in said
        assert not (played / "mixed").exists()


class TestLostRanks:
    def test_a_rank_that_stops_before_its_first_beat_is_known_to_the_others(self) -> None:
        """Half a second after it began. Until torch's own limit, a minute later, nobody missed it."""
        store = torch.distributed.HashStore()
        liveness = Liveness(1, 2, store)
        liveness.start([])
        try:
            assert store.check(["beat/1"])
        finally:
            liveness.close()

    @pytest.mark.parametrize(
        ("error", "text"), [(UserError("no corpus in x"), "no corpus in x"), (KeyError("x"), "KeyError: 'x'")]
    )
    def test_an_input_error_is_recorded_as_it_is_printed(self, error: Exception, text: str) -> None:
        """After a restart by torchrun it is the whole message."""
        liveness = Liveness(0, 2, torch.distributed.HashStore())
        liveness.tell(error, 2)
        assert liveness.failure == Failure(0, 2, text, True)

    def test_a_stopped_rank_ends_the_others_by_name(self, played: Path) -> None:
        output = (played / "output.txt").read_text()
        for rank in (0, 1):
            said = rf"error: rank {rank}: rank 2 kept the others waiting for \d+ s \(.*\) in step 2\n"
            assert re.search(said, output)
        assert re.findall(r"CODES (.*)", output) == ["[3, 3, -9, 0, 0, 0]"]
        assert json.loads((played / "hung" / "run.json").read_text())["status"] == "failed"

    @pytest.mark.parametrize("seen", ["by its number", "by another rank", "by its silence"])
    def test_every_rank_ends_within_5_seconds(self, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
        """docs/contracts.md, by a clock that the thread's own waits move: its main thread is deep inside a library.

        Rank 1 is lost at 0 s, right after the thread has looked. What it is seen by: its process on the same machine,
        a failure that another rank writes down, or, once a limit of 2 s is over, that it keeps the others waiting.
        """
        now, ended = [0.0], []
        store = torch.distributed.HashStore()
        liveness = Liveness(0, 3, store)
        me = liveness.who_am_i()
        elsewhere = me | {"host": "another"}
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait()
        everybody = [me, me | {"pid": dead.pid} if seen == "by its number" else elsewhere, elsewhere]
        monkeypatch.setattr(liveness._thread, "start", lambda: None)
        liveness.start(everybody)

        def wait(seconds: float) -> bool:
            now[0] += seconds
            if seen == "by another rank" and now[0] < 1.0:  # which has noticed it half a beat after this one looked
                store.compare_set("failure", "", json.dumps(asdict(Failure(1, 3, "rank 1 died", False))))
            return bool(ended)

        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(liveness._over, "wait", wait)
        monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, now[0])))
        liveness.timeout_seconds, liveness.step = 2.0, 1
        limit = 2.0 if seen == "by its silence" else 0.0
        with liveness.in_collective("gradients"):
            for rank in (1, 2):  # before the collective that rank 1 does not come to
                store.set(f"beat/{rank}", json.dumps([1, 0 if rank == 1 else 1]))
            liveness._run()
        ((code, seconds),) = ended
        assert code == 3
        assert seconds <= limit + 5.0

    def test_one_that_takes_the_store_along_is_named(self) -> None:
        """Without torchrun, rank 0 keeps it."""

        class Gone:
            def __getattr__(self, name: str) -> Any:
                def call(*args: Any) -> Any:
                    raise RuntimeError("Connection reset by peer")

                return call

        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        liveness = Liveness(1, 2, Gone())
        me = liveness.who_am_i()
        liveness.start([me | {"pid": ended.pid}, me])
        try:
            with pytest.raises(PeerFailed, match=rf"rank 0 died \(process {ended.pid}\)"):
                TorchGroup(World(1, 2), liveness, Gone()).broadcast("anything")
        finally:
            liveness.close()

    def test_one_that_never_came_is_not_waited_for_without_end(self) -> None:
        """Killed before anybody had heard of it, so that nobody watches it."""
        store = torch.distributed.HashStore()
        group = TorchGroup(World(0, 3), Liveness(0, 3, store), store)
        store.set("said/0/2", json.dumps({"at": "start", "value": None}))
        with pytest.raises(UserError, match="rank 1 is not there after 0 s"):
            group.gather("start", None, within_seconds=0.05)


class TestWorld:
    def test_without_torchrun_there_is_one_process(self) -> None:
        for environment in ({}, {"RANK": "3"}, {"RANK": "3", "WORLD_SIZE": ""}, {"WORLD_SIZE": "1"}):
            assert World.from_environment(environment) == World(0, 1, 0)
        group = Group()
        assert group.gather("x", 5) == [5]
        assert group.broadcast("x", "a") == "a"

    def test_torchrun_tells(self) -> None:
        assert World.from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == World(5, 8, 1)

    @pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
    def test_collectives_are_nccls_on_gpus_and_gloos_on_cpus(
        self, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What torch is asked for, and in which order, on a machine without GPUs: the process's own GPU is the current
        one before anything else can make a context on the first, and NCCL is given it, so that it connects at once."""
        calls: list[tuple[str, object]] = []

        def noted(name: str, answer: object) -> Callable[..., object]:
            return lambda *args, **more: [calls.append((name, args[0] if args else None)), answer][1]

        for name, answer in (
            ("set_device", None), ("get_device_capability", (9, 0)), ("get_device_name", "NVIDIA H100 80GB HBM3"),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, noted(name, answer))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        asked: dict[str, Any] = {}
        monkeypatch.setattr(
            torch.distributed, "init_process_group",
            lambda name, **more: [calls.append(("init_process_group", name)), asked.update(more)],
        )  # fmt: skip
        world, store = World(3, 4, 1, 2), torch.distributed.HashStore()
        place = place_of(RunConfig(runtime=RuntimeConfig(device=device)), world)
        TorchGroup(world, Liveness(3, 4, store), store).start_collectives(place.device, timeout_seconds=60.0)
        assert calls[-1] == ("init_process_group", backend)
        assert (asked["rank"], asked["world_size"]) == (3, 4)
        gpu = torch.device("cuda", 1)
        assert asked["device_id"] == (gpu if device == "cuda" else None)
        if device == "cuda":
            assert calls[0] == ("set_device", 1)
            # It is made so again once it is known to work. Builds with CUDA are asked more often, by the GPU's number,
            # whether they have kernels for it.
            assert set(calls[1:-1]) - {("set_device", 1), ("get_device_capability", 1)} == {
                ("get_device_capability", gpu), ("get_device_name", gpu),
            }  # fmt: skip

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: a CUDA device for each rank")
    def test_a_rank_makes_no_context_on_another_ranks_gpu(self) -> None:
        """What the calls above are for: while the second rank has found its place and allocated, the first GPU has as
        much free memory as before."""
        code = (
            "import torch; from gptlab.config.run import RunConfig, RuntimeConfig; "
            "from gptlab.runtime.hardware.place import place_of; "
            "from gptlab.runtime.processes.distributed import World; "
            "place = place_of(RunConfig(runtime=RuntimeConfig(device='cuda')), World(1, 2, 1, 2)); "
            "torch.ones(1, device=place.device); print('allocated', flush=True); input()"
        )
        free = torch.cuda.mem_get_info(0)[0]
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"allocated\n"
            taken = free - torch.cuda.mem_get_info(0)[0]
            process.communicate(b"\n")
        assert taken < 2**26

    def test_the_process_group_is_destroyed_at_the_end(self, played: Path) -> None:
        for name, ranks in (("three", 3), ("few-six", 6), ("stopped", 2), ("resumed", 3)):
            assert not any(of(played, name, rank)["left_a_group"] for rank in range(ranks)), name

    def test_a_process_group_of_somebody_else_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would be used, and destroyed at the end: a caller's own, or that of the run whose on_step trains another.
        That of a run that failed is used again."""
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "0")
        for was_left, says in ((False, "a process group already"), (True, "MASTER_PORT=0")):
            monkeypatch.setattr(TorchGroup, "was_left", was_left)
            with pytest.raises(UserError, match=says), join_others(World(0, 2), lambda error: 2):
                pass

    @pytest.mark.parametrize("rank", ["8", "-1", "x"])
    def test_nonsense_is_refused(self, rank: str) -> None:
        with pytest.raises(UserError, match=f"RANK={rank}"):
            World.from_environment({"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": "0"})

    @pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
    def test_copies_that_do_not_know_of_each_other_are_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        monkeypatch.setenv(name, "4")
        with together():
            pass
        assert capsys.readouterr().err.startswith(f"warning: 4 processes were started ({name}), and each works on its")
        assert apart({name: "1"}) is None
        assert apart({name: "4", "WORLD_SIZE": "4"}) is None

    @pytest.mark.parametrize(
        ("host", "port", "said"),
        [("", "29500", r"MASTER_ADDR=\(not set\), MASTER_PORT=29500"), ("node0", "", r"MASTER_PORT=\(not set\)"),
         ("node0", "99999", "MASTER_PORT=99999"), ("node0", "x", "MASTER_PORT=x"), ("node0", "0", "MASTER_PORT=0")],
    )  # fmt: skip
    def test_a_store_that_cannot_be_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, host: str, port: str, said: str
    ) -> None:
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UserError, match=said):
            _stores(World(0, 2), hosts=False)

    @pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK"])
    def test_one_of_several_without_its_number_is_refused(self, missing: str) -> None:
        """All would be rank 0, or all compute on the first GPU."""
        environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        del environment[missing]
        for given in (environment, environment | {missing: ""}):
            with pytest.raises(UserError, match=rf"\b{missing}=\(not set\)"):
                World.from_environment(given)

    def test_what_is_empty_is_not_set(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert World.from_environment(dict.fromkeys(names, "")) == World()
        assert World.from_environment(dict.fromkeys(names, "") | {"WORLD_SIZE": "1"}) == World()


class Echo(Group):
    """A group of two in which the other rank has the same numbers; notes what is sent, and when."""

    def __init__(self) -> None:
        super().__init__(World(0, 2))
        self.sent: list[int] = []

    def sum_later(self, tensor: Tensor, what: str) -> Callable[[], None]:
        self.sent.append(tensor.numel())
        tensor.mul_(2)
        return super().sum_later(tensor, what)


def test_checksum_sees_one_bit() -> None:
    a, b = torch.ones(5), torch.zeros(3, dtype=torch.float64)
    flipped = a.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert len({checksum([a, b]), checksum([flipped, b]), checksum([b, a])}) == 3
    assert checksum([a, b]) == checksum([a.clone(), b.clone()])
