"""Faults, restarts and shared commands under several ranks: all decide alike, and nothing that was trained is lost."""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_scenes import play_lanes
from tiny_runs import CLOCK_FIELDS, arguments, lines_of, write_corpus
from torch.distributed import HashStore, TCPStore

import gptlab
from gptlab.app.run.attempt import Attempt, begun_folder
from gptlab.app.run.ranks import report_peer_failure
from gptlab.config.errors import UserError
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.processes.liveness import Failure, Liveness, PeerFailed
from gptlab.runtime.processes.torch_group import Ended, TorchrunJob, _attempt, torchrun_job
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import _digest, load_checkpoint, load_newest, read_manifest
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import save_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")

FLAGS = {
    "steps": 6, "batch.total_tokens": 2 * 4 * 32, "eval.every_steps": 3, "eval.at_start": False,
    "eval.micro_sequences": 4, "checkpoint.every_steps": 2, "checkpoint.keep_last": 3, "sample.every_steps": 3,
    "sample.prompts": ["the ", "fox", "a lazy"],
}  # fmt: skip
"""Two micro-batches a step, dropout on, gradients clipped."""
BARE = {"eval__every_steps": None, "sample__prompts": []}
"""Of runs that are not compared with a whole one."""
KILL = ["SIGKILL"]


class Script:
    """The scenes of a test run, by lane."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lanes: dict[str, list[Any]] = {"first": []}
        self.lane = ""

    def train(self, name: str, ranks: int = 2, *, run: str | None = None, **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {field.replace("__", "."): value for field, value in changes.items()}
        return self.command(name, ranks, "train", *arguments(self.folder, run or name, flags))

    def command(self, name: str, ranks: int, *argv: object) -> dict[str, Any]:
        scene = {"name": name, "ranks": ranks, "argv": {"0": [str(word) for word in argv]}, "folder": str(self.folder)}
        self.lanes.setdefault(self.lane, []).append(scene)
        return scene

    def resume(self, name: str, ranks: int, run: str) -> dict[str, Any]:
        return self.command(name, ranks, "train", "--resume", self.folder / run)


def write_scenes(script: Script) -> None:
    folder = script.folder
    script.lanes["first"] = [["train", *map(str, arguments(folder, "one", FLAGS))]]
    script.lane = "whole"
    script.train("whole")
    script.command("sample-whole", 1, "sample", folder / "whole")

    script.lane = "broken"
    nothing = {"data": {"steps": [2, 3], "what": "nothing"}}
    script.train("never", **BARE)["trouble"] = [{"0": nothing, "1": nothing}]
    loss, gradient = {"steps": [2], "what": "loss"}, {"steps": [3], "what": "gradient"}
    script.train("nan", **BARE)["trouble"] = [{"0": {"data": gradient}, "1": {"data": loss}}]
    limit = script.train("limit", **BARE, faults__max_skipped_in_a_row=1)
    limit["trouble"] = [{"1": {"data": {"steps": [3, 4, 5], "what": "loss"}}}]
    half = script.train("half", **BARE, steps=4, runtime__dtype="float16", model__dropout=0.0)
    half["trouble"] = [{"1": {"data": {"steps": [3], "what": "matrix", "factor": 1e38}}}]

    script.lane = "stopped"
    script.train("saved")["trouble"] = [{str(rank): {"at": 5, "signals": ["SIGTERM", "SIGTERM"]} for rank in range(2)}]
    script.train("early", **BARE)["trouble"] = [{"1": {"at": "warming up", "signals": ["SIGTERM"]}}]
    for run, of_one in (("hurt", None), ("hurt-for-one", "its-own"), ("hurt-for-good", "its-lost")):
        scene = script.resume(run, 2, run)
        scene["copies"] = {run: ["step-00000005/model-00002-of-00002.safetensors"] if of_one is None else []}
        if of_one is not None:
            scene["argv"]["1"] = ["train", "--resume", str(folder / of_one)]
            damaged = ["step-00000005/state.json", "step-00000004/optimizer-00001-of-00002.safetensors"]
            scene["copies"][of_one] = damaged + ["step-00000002/manifest.json"] * (of_one == "its-lost")
    both = script.train("both", **BARE)
    both["trouble"] = [{"0": {"at": 3, "signals": ["SIGINT"]}, "1": {"at": 3, "signals": ["SIGTERM", "SIGINT"]}}]

    script.lane = "unlike"
    script.train("other-code")["trouble"] = [{"1": {"code": str(folder / "changed" / "gptlab")}}]
    script.train("other-data")["trouble"] = [{"1": {"corpus": str(folder / "other-corpus")}}]
    timed = {str(rank): {"bfloat16 is faster": rank == 0} for rank in range(2)}
    script.train("other-dtype", runtime__dtype="auto", steps=1, **BARE)["trouble"] = [timed]
    script.train("other-kernels")["trouble"] = [{"1": {"kernels": "error: out of order"}}]

    script.lane = "jobs"
    moments = [
        {"0": {"at": "making the folder", "signals": KILL}},
        {"0": {"at": "filling the folder", "signals": KILL}},
        {"1": {"at": 1, "signals": KILL}},
        {"0": {"at": 4, "signals": KILL}},
    ]
    script.train("killed").update(attempts=6, trouble=moments)
    hurry = script.train("hurry", **BARE)
    hurry["trouble"] = [{"1": {"at": 3, "signals": ["SIGINT", "SIGINT"], "in_a_hurry": True}}]

    first = {"0": {"at": 3, "signals": KILL}}
    script.lane = "more jobs"
    unnamed = script.train("unnamed", **BARE, steps=4)
    words = unnamed["argv"]["0"]
    del words[(place := words.index("--run-dir")) : place + 2]  # so that it is called after the time
    unnamed.update(attempts=2, trouble=[first], folder=str(folder / "unnamed"), counts=[[0, 1], [0, 0]])
    (folder / "unnamed").mkdir()
    script.train("alone", 1, **BARE, steps=4).update(attempts=3, trouble=[first])
    script.train("stranger", run="one").update(attempts=2, lingers={"1": 0.3})
    asked = script.train("asked")
    asked.update(attempts=2, trouble=[{"1": {"at": 3, "signals": ["SIGTERM"]}}], lingers={"0": 0.3})
    asked["counts"] = [[0, 0], [0, 1]]  # rank 0's torchrun stops it while it lingers, and does not count that
    asked_early = script.train("asked-early")
    asked_early.update(attempts=2, trouble=[{"1": {"at": "making the data", "signals": ["SIGTERM"]}}])
    nan = {"1": {"data": {"steps": [3], "what": "loss"}}}
    exploded = script.train("exploded", **BARE, faults__max_skipped_in_a_row=0)
    exploded.update(attempts=2, trouble=[nan], lingers={"1": 0.3})
    script.resume("asked-on", 2, "asked")

    script.lane = "shared"
    core, prompts = ("--core", "--core-dir", folder / "bundle"), ("--prompt", "the ", "fox", "a", "lazy dog", "quick")
    for name, ranks in (("of-one", 1), ("of-three", 3)):
        script.command(f"eval-{name}", ranks, "eval", folder / "one", "--micro-sequences", 2)
        script.command(f"core-{name}", ranks, "eval", folder / "one", *core)
        script.command(f"sample-{name}", ranks, "sample", folder / "one", *prompts)
    script.command("eval-unlike", 2, "eval", folder / "one")["argv"]["1"] = ["eval", str(folder / "one"), "--core"]
    script.command("eval-nothing", 2, "eval", folder / "nothing")
    script.train("copies", 3, parallel__mode="sharded", parallel__shard_ranks=2)
    script.train("any-size", 3, parallel__exact_any_world_size=True)
    script.command("plan", 2, "plan")
    script.command("list", 2, "train", "--list")

    script.lane = "compiled"
    # Few parts, each of which takes time to trace.
    off = ("model__residual_lambdas", "model__qk_norm", "model__embedding_norm")
    small = dict.fromkeys(off, False) | {
        "model__dropout": 0.0, "model__n_layer": 1, "model__window_pattern": "L", "model__value_embeddings": "off",
        "model__position": "learned", "model__logit_softcap": None, "steps": 2, "eval__every_steps": None,
        "sample__prompts": [],
    }  # fmt: skip
    script.train("plain", **small)
    compiled = script.train("compiled", runtime__compile="on", **small)
    compiled["trouble"] = [{str(rank): {"backend": "eager"} for rank in range(2)}]  # no minutes of a C++ compiler


@pytest.fixture(scope="module")
def played(folder: Path) -> Path:
    """The folder, when all scenes have been played in it."""
    write_corpus(folder / "other-corpus")
    (folder / "other-corpus" / "000.txt").write_text("one text that is another\n")
    other = shutil.copytree(Path(gptlab.__file__).parent, folder / "changed" / "gptlab")
    (other / "__init__.py").write_text((other / "__init__.py").read_text() + "# another\n")
    script = Script(folder)
    write_scenes(script)
    play_lanes(folder, script.lanes)
    return folder


def codes(folder: Path, scene: str) -> list[list[int]]:
    """By attempt and rank."""
    if (path := folder / f"{scene}.json").exists():  # of a job
        return json.loads(path.read_text())
    return [[said(folder, scene, rank)["code"] for rank in range(len(list(folder.glob(f"{scene}-0-*.json"))))]]


def said(folder: Path, scene: str, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{scene}-{attempt}-{rank}.json").read_text())


def saved_steps(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All lines but for the clock, and the last checkpoint's weights, moments, generators and loss scale."""
    lines = [
        {name: value for name, value in line.items() if name not in CLOCK_FIELDS}
        for line in read_metrics(run / "metrics.jsonl")
    ]
    saved = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    tensors = {name: tensor.numpy().tobytes() for name, tensor in (saved.model | saved.optimizer).items()}
    return lines, tensors | {name: saved.state[name] for name in ("step", "loss_ema", "scaler")}


class TestBrokenSteps:
    def test_all_ranks_leave_the_update_out_as_if_the_batch_had_never_been(self, played: Path) -> None:
        """A loss on rank 1, then a gradient on rank 0."""
        assert codes(played, "nan") == [[0, 0]]
        for rank in range(2):
            assert said(played, "nan", rank)["weights"] == said(played, "never")["weights"]
            assert said(played, "nan", rank)["moments"] == said(played, "never", rank)["moments"]
        assert result(played / "nan")[1] == result(played / "never")[1]
        assert result(played / "nan")[1] != result(played / "whole")[1]
        events = [(event["step"], event["what"], event["reason"]) for event in lines_of(played / "nan", "event")]
        assert events == [(3, "skipped", "loss"), (4, "skipped", "gradient")]
        assert json.loads((played / "nan" / "summary.json").read_text())["skipped_updates"] == 2
        assert "first non-finite gradient: residual_lambdas" in said(played, "nan")["out"]

    def test_over_the_limit_all_end_with_3(self, played: Path) -> None:
        assert codes(played, "limit") == [[3, 3]]
        assert "training failed: the training loss is nan in step 5" in said(played, "limit")["err"]
        assert json.loads((played / "limit" / "run.json").read_text())["status"] == "failed"

    def test_float16_overflows_on_one_rank_halve_the_scale_of_all(self, played: Path) -> None:
        """In a matrix that one rank owns, so that no other sees it by itself."""
        assert codes(played, "half") == [[0, 0]]
        assert said(played, "half", 0)["weights"] == said(played, "half", 1)["weights"]
        saved = load_checkpoint(list_checkpoints(played / "half" / "checkpoints")[-1])
        assert saved.state["scaler"]["scale"] == 65536.0 / 2
        norms = [line["grad_norm"] for line in lines_of(played / "half", "train")]
        assert [step for step, norm in enumerate(norms) if isinstance(norm, str)] == [3]
        assert lines_of(played / "half", "event") == [], "an overflow is no fault"


class TestSignals:
    def test_two_signals_to_all_ranks_make_one_checkpoint(self, played: Path) -> None:
        """As torchrun passes them on."""
        assert codes(played, "saved") == [[75, 75]]
        assert saved_steps(played / "saved") == ["step-00000002", "step-00000004", "step-00000005"]

    def test_different_signals_to_different_ranks(self, played: Path) -> None:
        assert codes(played, "both") == [[75, 75]]
        assert "SIGINT (rank 0): stopped after step 3, saved" in said(played, "both")["out"]
        assert saved_steps(played / "both")[-1] == "step-00000003"

    def test_a_second_interrupt_to_one_rank_ends_all_at_once(self, played: Path) -> None:
        """Contract: exit code 75 on every rank, and the last checkpoint is untouched."""
        assert codes(played, "hurry") == [[75, 75]]
        assert json.loads((played / "hurry" / "run.json").read_text())["status"] == "preempted"
        assert "step-00000003" not in saved_steps(played / "hurry")

    def test_before_the_first_step(self, played: Path) -> None:
        assert codes(played, "early") == [[75, 75]]
        assert "SIGTERM (rank 1): stopped before the first step" in said(played, "early")["out"]
        assert json.loads((played / "early" / "run.json").read_text())["status"] == "preempted"


class TestDisagreement:
    @pytest.mark.parametrize(("name", "what"), [("other-code", "gptlab code"), ("other-data", "training data")])
    def test_is_refused(self, played: Path, name: str, what: str) -> None:
        assert codes(played, name) == [[2, 2]]
        error = said(played, name)["err"].splitlines()[-1]
        assert error.startswith(f"gptlab: error: rank 1's {what} differs from rank 0's")
        assert not (played / name / "config.json").exists()

    @pytest.mark.parametrize(
        ("name", "field"), [("copies", "parallel.shard_ranks = 2"), ("any-size", "parallel.exact_any_world_size")]
    )
    def test_a_wrong_number_of_ranks_is_refused_once(self, played: Path, name: str, field: str) -> None:
        assert codes(played, name) == [[2, 2, 2]]
        assert said(played, name)["err"].splitlines()[-1].startswith(f"gptlab: error: {field}")
        assert [said(played, name, rank)["err"] for rank in (1, 2)] == ["", ""]

    def test_the_dtype_is_that_which_rank_0_timed(self, played: Path) -> None:
        """Processors alike, timed side by side, may find products in bfloat16 a little faster, or a little slower."""
        assert codes(played, "other-dtype") == [[0, 0]]
        assert json.loads((played / "other-dtype/run.json").read_text())["dtype"] == "bfloat16"

    def test_a_rank_that_cannot_build_the_kernels_is_named_with_the_reason(self, played: Path) -> None:
        """Its losses would differ from those of the others, and nobody would say so."""
        assert codes(played, "other-kernels") == [[2, 2]]
        error = said(played, "other-kernels")["err"].splitlines()[-1]
        assert error.startswith("gptlab: error: rank 1's implementations differ from rank 0's (error: out of order)")
        assert not (played / "other-kernels" / "config.json").exists()


class TestDamagedCheckpoints:
    def test_all_ranks_fall_back_to_the_one_before(self, played: Path) -> None:
        assert codes(played, "hurt") == [[0, 0]]
        assert said(played, "hurt")["out"].count("step-00000005 is damaged: model-00002-of-00002.safetensors") == 1
        assert "step 00004 " not in said(played, "hurt")["out"]
        assert result(played / "hurt") == result(played / "whole")

    def test_all_fall_back_with_one_that_cannot_read_it(self, played: Path) -> None:
        assert codes(played, "hurt-for-one") == [[0, 0]]
        for step, file in ((5, "state.json"), (4, "optimizer-00001-of-00002.safetensors")):
            named = f"warning: rank 1: checkpoint {played}/its-own/checkpoints/step-{step:08d} is damaged: {file}"
            assert named in said(played, "hurt-for-one")["out"]
        assert result(played / "hurt-for-one") == result(played / "whole")
        assert [len(said(played, "hurt-for-one", rank)["weights"]) for rank in range(2)] == [4, 4]

    def test_none_that_all_can_read(self, played: Path) -> None:
        assert codes(played, "hurt-for-good") == [[2, 2]]
        assert "no intact checkpoint in" in said(played, "hurt-for-good")["err"]
        assert said(played, "hurt-for-good", 1)["err"] == ""


class TestShared:
    @pytest.mark.parametrize("what", ["eval", "core", "sample"])
    def test_says_what_one_process_says(self, played: Path, what: str) -> None:
        assert codes(played, f"{what}-of-three") == [[0, 0, 0]]
        ours, expected = (said(played, f"{what}-of-{n}")["out"].splitlines() for n in ("three", "one"))
        assert len(ours) == len(expected) > 4
        for line, its in zip(ours, expected, strict=True):
            key, _, value = line.rpartition(": ")
            if what != "sample" and "." in value:  # the loss of one batch is the same number, added up elsewhere
                assert (key, float(value)) == (its.rpartition(": ")[0], pytest.approx(float(its.split()[-1]), abs=1e-6))
            else:
                assert line == its
        assert [said(played, f"{what}-of-three", rank)["out"] for rank in (1, 2)] == ["", ""]
        assert [said(played, f"{what}-of-three", rank)["err"] for rank in (1, 2)] == ["", ""]

    def test_samples_while_training_are_those_of_one_process(self, played: Path) -> None:
        texts = [line["text"] for line in lines_of(played / "whole", "sample")]
        assert len(texts) == 6
        assert said(played, "sample-whole")["out"] == "---\n".join(f"{text}\n" for text in texts[3:])

    def test_ranks_that_are_asked_for_different_things_refuse(self, played: Path) -> None:
        assert codes(played, "eval-unlike") == [[2, 2]]
        assert "rank 1 was given other arguments than rank 0" in said(played, "eval-unlike")["err"]

    def test_exit_codes_are_those_of_one_process(self, played: Path) -> None:
        assert codes(played, "eval-nothing") == [[2, 2]]
        assert codes(played, "plan") == [[2, 2]]
        assert said(played, "plan")["err"].startswith("gptlab: error: gptlab plan runs in one process")
        assert said(played, "plan", 1)["err"] == ""
        assert codes(played, "list") == [[0, 0]]
        assert ("quickstart" in said(played, "list")["out"], said(played, "list", 1)["out"]) == (True, "")

    def test_compiled_training(self, played: Path) -> None:
        """Traced graphs and gradients that leave for the other ranks get along, and nothing is traced twice. Graphs
        add in another order: float32 rounds at 1e-7, of which Adam's first step makes more."""
        assert codes(played, "compiled") == [[0, 0]]
        assert said(played, "compiled", 0)["weights"] == said(played, "compiled", 1)["weights"]
        assert "compiling: " in said(played, "compiled")["out"]
        losses, expected = ([line["loss"] for line in lines_of(played / n, "train")] for n in ("compiled", "plain"))
        assert losses == pytest.approx(expected, rel=1e-4)


class TestRestarts:
    def test_a_run_that_is_killed_again_and_again_goes_on_by_itself(self, played: Path) -> None:
        assert [attempt[0] for attempt in codes(played, "killed")] == [-9, -9, 3, -9, 0]
        assert result(played / "killed") == result(played / "whole")

    def test_one_process_alone_too(self, played: Path) -> None:
        assert codes(played, "alone") == [[-9], [0]]

    def test_a_folder_that_is_called_after_the_time_is_found_again(self, played: Path) -> None:
        """Also by ranks whose torchruns have counted differently."""
        assert codes(played, "unnamed") == [[3, -9], [0, 0]] or codes(played, "unnamed") == [[-9, 3], [0, 0]]
        (run,) = (played / "unnamed" / "runs").iterdir()
        assert [line["step"] for line in lines_of(run, "train")] == [1, 2, 3, 4]

    def test_the_folder_of_somebody_else_is_refused(self, played: Path) -> None:
        assert codes(played, "stranger") == [[2, 2]] * 2
        for attempt in range(2):
            assert "already holds a run" in said(played, "stranger", attempt=attempt)["err"]
        assert json.loads((played / "one" / "run.json").read_text())["status"] == "finished"

    def test_a_run_that_was_asked_to_stop_is_not_started_again(self, played: Path) -> None:
        assert codes(played, "asked") == [[75, 75]] * 2
        assert [len(said(played, "asked", attempt=attempt)["weights"]) for attempt in range(2)] == [3, 0]
        assert "not tried again after torchrun's restart" in said(played, "asked", attempt=1)["out"]
        assert codes(played, "asked-on") == [[0, 0]]  # by another job
        assert result(played / "asked") == result(played / "whole")

    def test_nor_is_one_before_it_has_a_folder(self, played: Path) -> None:
        assert codes(played, "asked-early") == [[75, 75]] * 2
        assert not (played / "asked-early").exists()

    def test_nor_is_a_training_that_failed(self, played: Path) -> None:
        """Both ranks exit with 3, though torchrun signals rank 1 while that takes its time to exit."""
        assert codes(played, "exploded") == [[3, 3]] * 2
        assert [len(said(played, "exploded", attempt=attempt)["weights"]) for attempt in range(2)] == [3, 0]
        assert json.loads((played / "exploded" / "run.json").read_text())["status"] == "failed"


class Store:
    """As much of torchrun's as a Job asks for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, b"").decode() == expected:
            self.set(key, desired)
        return self.values[key]


class Gone:
    """The store of a torchrun that is no more."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()

    def __getattr__(self, name: str) -> Any:
        def fails(*args: object) -> None:
            raise RuntimeError("connection reset by peer")

        return fails


class TestJob:
    def test_without_torchrun_nothing_is_remembered(self) -> None:
        job = torchrun_job({})
        job.will_begin(Path("runs/a"))
        job.ends(3, "it broke")
        assert (job.id, job.folder(), job.ended()) == (None, None, None)

    def test_an_attempt_knows_what_those_before_it_noted(self) -> None:
        store = Store()
        first = TorchrunJob(store, attempt=0)
        first.will_begin(Path("runs/a"))
        first.ends(2, "what rank 1 knows")
        first.ends(75, "what torchrun's SIGTERM makes of the others")
        second = TorchrunJob(store, attempt=1)
        assert second.id == first.id != TorchrunJob(Store()).id
        assert second.folder() == Path("runs/a").absolute()
        assert second.ended() == Ended(2, "what rank 1 knows")

    def test_a_restart_that_torchrun_does_not_count_was_no_wish_to_end(self) -> None:
        """Machines came or went: torchrun stops all by SIGTERM, and starts them with the same count."""
        store = Store()
        TorchrunJob(store, attempt=1).ends(75, "SIGTERM")
        assert TorchrunJob(store, attempt=1).ended() is None
        assert TorchrunJob(store, attempt=2).ended() is None  # when a process was lost after that

    def test_each_torchrun_counts_for_itself(self) -> None:
        """One saw its process fail; the other stopped its own by SIGTERM, and has counted more before."""
        store = Store()
        TorchrunJob(store, node="0", attempt=1).ends(75, "torchrun's SIGTERM")
        TorchrunJob(store, node="1", attempt=0).ends(2, "what rank 1 knows")
        assert TorchrunJob(store, node="0", attempt=1).ended() is None
        assert TorchrunJob(store, node="1", attempt=1).ended() == Ended(2, "what rank 1 knows")

    def test_runs_of_one_program_are_told_apart(self) -> None:
        store = Store()
        TorchrunJob(store, run="1").will_begin(Path("runs/a"))
        assert TorchrunJob(store, run="2", attempt=1).folder() is None

    def test_runs_of_one_program_are_counted_whoever_sets_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        torchrun = {
            "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        }  # fmt: skip
        torchrun_job(torchrun).will_begin(Path("runs/a"))
        booted = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 60)
        assert torchrun_job(torchrun).folder() is None

    def test_a_folder_that_another_has_made_meanwhile_is_not_taken(self, tmp_path: Path) -> None:
        job = TorchrunJob(Store(), attempt=1)
        job.will_begin(tmp_path / "r")
        assert begun_folder(job) is None  # killed before it was there
        RunDirectory.create(tmp_path / "r", {}, {"job": "another"})
        assert begun_folder(job) is None
        RunDirectory(tmp_path / "r").set_status("running", job=job.id)
        assert begun_folder(job) == tmp_path / "r"

    def test_a_store_that_is_gone_is_no_error(self) -> None:
        job = TorchrunJob(Gone())
        job.will_begin(Path("runs/a"))
        job.ends(3, "it broke")
        assert (job.folder(), job.ended()) == (None, None)


def test_an_attempt_is_named_for_its_own_ranks_only() -> None:
    """The requests of an earlier attempt are still in the store: rank 1 had its answer, rank 2 died before it came."""
    store = HashStore()
    store.set("gptlab/asks/1", "gptlab/old-1")
    store.set("gptlab/old-1/attempt", "gptlab/old")
    store.set("gptlab/asks/2", "gptlab/old-2")
    name, admit = _attempt(World(0, 3), store)
    admit()
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(_attempt, World(rank, 3), store) for rank in (1, 2)]
        while not all(other.done() for other in others):
            admit()
            time.sleep(0.001)
    assert [other.result()[0] for other in others] == [name, name]
    assert _attempt(World(0, 3), store)[0] != name


def test_who_waits_for_a_word_with_a_limit_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one only silence counts, and the other rank has just been heard of."""
    store = Store()
    store.set("said/7/0", "")
    liveness = Liveness(0, 2, store)
    liveness.timeout_seconds, liveness.step = 5.0, 3
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for what, text in (("samples", "rank 1 kept the others waiting for 6 s (samples) in step 3"), ("", None)):
        with liveness.waiting_for({"said/7/0": 0, "said/7/1": 1}, what, watched=[1]):
            now[0] += 6.0
            store.set("beat/1", f"[{len(what)}, 0]")
            lost = liveness._lost()
        assert (lost and lost.text) == text


def test_a_lost_rank_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By rank 0, with the last checkpoint."""
    run = RunDirectory.create(tmp_path / "run", {}, {})
    with Console() as console, pytest.raises(PeerFailed) as lost:
        Attempt(console, [], 0.0, run=run).ended_by(PeerFailed(Failure(1, 3, "rank 1 died in step 2", False)))
    assert report_peer_failure(lost.value) == 3
    said = "gptlab: error: training failed: rank 1 died in step 2; no checkpoint had been saved yet\n"
    assert capsys.readouterr().err == said


class TwoRanks(Group):
    """Rank 0 of two; the other says what it is told to."""

    def __init__(self, other: dict[str, Any]) -> None:
        super().__init__(World(0, 2))
        self.other = other

    def gather(self, name: str, value: Any, **limits: Any) -> list[Any]:
        return [value, value | {key: told for key, told in self.other.items() if key in value}]


def test_a_checkpoint_that_holds_other_weights_for_a_rank_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model={"w": torch.full((3,), float(step))}, optimizer={}, state={})
    weights = _digest([read_manifest(tmp_path / "step-00000001").files["model.safetensors"].sha256])
    warnings: list[str] = []
    assert load_newest(tmp_path, warnings.append, TwoRanks({"weights": weights})).step == 1
    assert warnings == [f"rank 1: checkpoint {tmp_path / 'step-00000002'} holds other weights than for rank 0"]


class SecondOfTwo(Group):
    """Rank 1 of two; what rank 0 sends is given."""

    def __init__(self, told: Any) -> None:
        super().__init__(World(1, 2))
        self.told = told

    def broadcast(self, name: str, value: Any = None) -> Any:
        return self.told

    def gather(self, name: str, value: Any, **limits: Any) -> list[Any]:
        return [None, value]


class TestRunFolder:
    """Without these, ranks on two machines would train until their first save, and lose everything."""

    def test_is_shared_by_its_absolute_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        said: list[Any] = []
        first = Attempt(Console(), [], 0.0, run=RunDirectory.create(Path("r"), {}, {}))
        monkeypatch.setattr(first.group, "broadcast", lambda name, value: said.append(value) or value)
        first.share_run_folder()
        monkeypatch.chdir("/")
        second = Attempt(Console(), [], 0.0, group=SecondOfTwo(*said))
        second.share_run_folder()
        assert second.run == RunDirectory(tmp_path / "r")

    def test_is_where_a_rank_finds_it_by_the_path_that_was_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a file server, where the folder that other machines mount as /home is a link to /export/home."""
        run = RunDirectory.create(tmp_path / "r", {}, {})
        monkeypatch.chdir(tmp_path)
        told = {"paths": ["/export/home/r", "r"], "run": run.recorded()}
        second = Attempt(Console(), [], 0.0, group=SecondOfTwo(told))
        second.share_run_folder()
        assert second.run == RunDirectory(Path("r"))

    def test_may_be_seen_a_moment_later(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A network file system shows for some seconds what was there before."""
        run = RunDirectory.create(tmp_path / "r", {}, {})
        told = {"paths": [str(run.path)], "run": run.recorded()}
        seen = iter([{}, {"resumes": []}, run.recorded()])
        monkeypatch.setattr(RunDirectory, "recorded", lambda self: next(seen))
        second = Attempt(Console(), [], 0.0, group=SecondOfTwo(told))
        second.share_run_folder()
        assert second.run == run

    @pytest.mark.parametrize("its", ["nothing", "a copy that is not resumed"])
    def test_that_a_rank_does_not_see_is_refused(
        self, tmp_path: Path, its: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gptlab.app.run.attempt.SEEN_SECONDS", 0.0)
        run = RunDirectory.create(tmp_path / "r", {}, {})
        if its != "nothing":
            shutil.copytree(run.path, tmp_path / "its")
        run.set_status("running", resumes=[{"start": "today"}])
        told = {"paths": [str(tmp_path / "its"), "its"], "run": run.recorded()}
        with pytest.raises(
            UserError, match=r"^rank 1 \(on .*\) does not see the run folder .*/its of rank 0: give all"
        ):
            Attempt(Console(), [], 0.0, group=SecondOfTwo(told)).share_run_folder()

    def test_that_a_rank_does_not_see_is_recorded_as_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = RunDirectory.create(tmp_path / "r", {}, {})
        first = Attempt(Console(), [], 0.0, run=run)
        monkeypatch.setattr(first.group, "gather", lambda name, value: [None, None, "node7"])
        with pytest.raises(UserError, match=r"rank 2 \(on node7\)"):
            first.share_run_folder()
        assert run.recorded()["status"] == "failed"
