"""--exact-any-world-size: the same bits with 1, 2, 4 and 8 processes, and where their number changes in mid-run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_scenes import play_scenes
from tiny_runs import arguments, command, differences, lines_of, outcome, train
from torch import Tensor
from torch.nn import Parameter

from gptlab.runtime.hardware.device import deterministic_kernels
from gptlab.runtime.processes.distributed import Group, World
from gptlab.training.parallel.deterministic import ReductionTree, held_sums


def tree(shards: dict[int, Tensor], first: int = 0, stride: int = 1) -> Tensor | None:
    """The sum of the shards first, first + stride, ...: the definition, from the top down."""
    if stride == 8:
        return shards.get(first)
    one, other = tree(shards, first, 2 * stride), tree(shards, first + stride, 2 * stride)
    if one is None or other is None:
        return other if one is None else one
    return one + other


def by_tree(terms: list[Tensor]) -> Tensor:
    """What the terms of all micro-batches add up to."""
    shards: dict[int, Tensor] = {}
    for number, term in enumerate(terms):
        shards[number % 8] = shards[number % 8] + term if number % 8 in shards else term
    total = tree(shards)
    assert total is not None
    return total


def bits(tensor: Tensor) -> list[int]:
    """Two zeros of different signs are equal numbers, and not the same bits."""
    return tensor.detach().reshape(-1).view(torch.int64 if tensor.dtype == torch.float64 else torch.int32).tolist()


class WiredGroup(Group):
    """Ranks as threads: what one gives the other takes."""

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        super().__init__(World(rank, size))
        self.wires = wires

    def exchange(self, partner: int, *, give: Tensor | None, take: Tensor | None) -> None:
        if give is not None:
            self.wires[self.rank, partner].put(give.clone())
        if take is not None:
            take.copy_(self.wires[partner, self.rank].get(timeout=30))


SHAPES = [(3, 5), (), (7,), (2, 2, 2)]


def terms_of(micro_batches: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Gradients (float32) and losses (float64) of each micro-batch, over eight binary orders of magnitude."""
    generator = torch.Generator().manual_seed(micro_batches)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.exp2(torch.randint(-4, 5, shape, generator=generator).to(dtype))
        return torch.randn(shape, generator=generator, dtype=dtype) * size

    gradients = [[draw(shape, torch.float32) for shape in SHAPES] for _ in range(micro_batches)]
    return gradients, [draw((), torch.float64) for _ in range(micro_batches)]


def add_up(size: int, gradients: list[list[Tensor]], losses: list[Tensor]) -> list[tuple[list[Tensor], Tensor, int]]:
    """On each of `size` ranks: gradients and loss of the step, and the most sums of gradients that it held at once."""
    # All of them before any thread begins: of two threads that ask a defaultdict, each may get a queue of its own.
    wires: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in product(range(size), repeat=2)}
    found: dict[int, tuple[list[Tensor], Tensor, int]] = {}

    def one_rank(rank: int) -> None:
        parameters = [Parameter(torch.ones(shape)) for shape in SHAPES]
        group = WiredGroup(rank, size, wires)
        sums = ReductionTree(parameters, group, micro_batches=len(losses), bucket_bytes=70)
        for _ in range(2):  # the second step begins as the first one did
            indices = list(range(rank, len(losses), size))
            loss, made, most = torch.zeros((), dtype=torch.float64), weakref.WeakSet[Tensor](), 0
            for place in sums.order(indices):
                for parameter, term in zip(parameters, gradients[indices[place]], strict=True):
                    # As autograd does: the first one is kept as it is, the others are added to it in place.
                    if parameter.grad is None:
                        parameter.grad = term.clone()
                        made.add(parameter.grad)
                    else:
                        parameter.grad += term
                loss = loss + losses[indices[place]]
                most = max(most, len(made))
                loss = sums.after_micro_batch(indices[place], loss)
            total = sums.finish(loss)
            held = [parameter.grad for parameter in parameters]
            assert all(gradient is not None for gradient in held)
            found[rank] = [g for g in held if g is not None], total, most // len(SHAPES)
            for parameter in parameters:
                parameter.grad = None

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


class TestTree:
    @pytest.mark.parametrize("size", [1, 2, 4, 8])
    @pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6, 7, 8, 11, 16, 21])
    def test_is_the_one_of_the_definition(self, size: int, micro_batches: int) -> None:
        gradients, losses = terms_of(micro_batches)
        expected = [by_tree([of_one[place] for of_one in gradients]) for place in range(len(SHAPES))]
        for summed, loss, most in add_up(size, gradients, losses):
            assert [bits(tensor) for tensor in summed] == [bits(tensor) for tensor in expected]
            assert bits(loss) == bits(by_tree(losses))
            assert most <= 4 - size.bit_length() + 1  # log2(8 / size), and the one in hand
            assert most == held_sums(micro_batches) or size > 1

    @pytest.mark.parametrize("micro_batches", [3, 5, 8, 16])
    def test_another_order_has_other_bits(self, micro_batches: int) -> None:
        """Or equality would show nothing."""
        terms = [of_one[0] for of_one in terms_of(micro_batches)[0]]
        plain = terms[0]
        for term in terms[1:]:
            plain = plain + term
        assert bits(plain) != bits(by_tree(terms))

    @pytest.mark.parametrize("size", [1, 2, 8])
    def test_an_empty_shard_is_no_zero(self, size: int) -> None:
        """-0 + 0 is 0."""
        terms = [torch.full(shape, -0.0) for shape in SHAPES]
        for summed, loss, _ in add_up(size, [terms], [torch.tensor(-0.0, dtype=torch.float64)]):
            assert [bits(tensor) for tensor in summed] == [bits(term) for term in terms]
            assert float(loss).hex() == "0x0.0p+0"  # a sum of losses begins at 0, as without ranks

    def test_a_parameter_without_a_gradient_is_left_without(self) -> None:
        """A mistake, which the optimizer names; not a zero that hides it."""
        used, forgotten = Parameter(torch.ones(2)), Parameter(torch.ones(3))
        sums = ReductionTree([used, forgotten], Group(), micro_batches=1)
        used.grad = torch.ones(2)
        sums.finish(sums.after_micro_batch(0, torch.zeros(())))
        assert used.grad is not None
        assert forgotten.grad is None


FLAGS = {
    "steps": 4, "batch.total_tokens": 11 * 4 * 32, "eval.every_steps": 2, "checkpoint.every_steps": None,
    "checkpoint.save_best": True, "optim.muon.normuon_beta2": 0.95, "sample.every_steps": None,
    "exact_any_world_size": "on",
}  # fmt: skip
"""Eleven micro-batches a step: three shards have two. Dropout is on, gradients are clipped, Muon evens out its neurons,
and AdamW does the rest, in float32."""


def scenes(folder: Path) -> list[dict[str, Any]]:
    def run(name: str, ranks: int, **changes: Any) -> dict[str, Any]:
        flags = FLAGS | {field.replace("__", "."): value for field, value in changes.items()}
        return {"name": name, "ranks": ranks, "argv": ["train", *arguments(folder, name, flags)]}

    few = {"batch__total_tokens": 3 * 4 * 32, "steps": 2}
    bfloat16 = {"runtime__dtype": "bfloat16", "steps": 2}
    resume = {"argv": ["train", "--resume", str(folder / "changed")]}
    return [
        run("one", 1),
        run("plain", 1, exact_any_world_size="off"),
        run("few-one", 1, **few),
        run("few-eight", 8, **few),
        run("bfloat16-one", 1, **bfloat16),
        run("bfloat16-two", 2, **bfloat16),
        run("changed", 2) | {"signal": ["SIGTERM", 1, 1]},
        {"name": "resumed", "ranks": 4, "signal": ["SIGINT", 2, 3], **resume},
        {"name": "ended", "ranks": 1, **resume},
        run("three", 3),
        run("unlike", 2) | {"more": {"1": ["--runtime.threads", "2"]}},
    ]


@pytest.fixture(scope="module")
def played(folder: Path) -> Path:
    """The folder, when all scenes have been played in it."""
    play_scenes(folder, scenes(folder))
    return folder


def of(folder: Path, scene: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{scene}-{rank}.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tried on Linux")
class TestRuns:
    @pytest.mark.parametrize(("name", "alone"), [("few-eight", "few-one"), ("bfloat16-two", "bfloat16-one")])
    def test_are_the_same_bits_with_any_number_of_processes(self, played: Path, name: str, alone: str) -> None:
        """Lines, weights, moments, generators, and which checkpoint is the best."""
        assert differences(outcome(played / name), outcome(played / alone)) == []
        for rank in range(json.loads((played / name / "run.json").read_text())["world_size"]):
            assert of(played, name, rank)["weights"] == of(played, alone, 0)["weights"]

    def test_also_where_it_changes_in_mid_run(self, played: Path) -> None:
        assert [of(played, "changed", rank)["code"] for rank in range(2)] == [75, 75]
        assert [of(played, "resumed", rank)["code"] for rank in range(4)] == [75, 75, 75, 75]
        assert of(played, "ended", 0)["code"] == 0
        record = json.loads((played / "changed" / "run.json").read_text())
        assert [record["world_size"], *(resume["world_size"] for resume in record["resumes"])] == [2, 4, 1]
        assert differences(outcome(played / "changed"), outcome(played / "one")) == []

    def test_which_are_not_those_of_sums_as_they_come(self, played: Path) -> None:
        """The same run by plain sums is the same to rounding, and has other weights after every update."""
        exact, plain = (lines_of(played / name, "train") for name in ("one", "plain"))
        assert exact[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=1e-3)
        ours, others = (of(played, name, 0)["weights"] for name in ("one", "plain"))
        assert len(ours) == 4
        assert all(one != other for one, other in zip(ours, others, strict=True))

    def test_three_processes_are_refused_by_one_line(self, played: Path) -> None:
        assert [of(played, "three", rank)["code"] for rank in range(3)] == [2, 2, 2]
        said = of(played, "three", 0)["err"].splitlines()
        assert said == [
            "gptlab: error: parallel.exact_any_world_size = True: its order of additions is made for 1, 2, 4, 8 "
            "processes, not for 3 (nearest valid: 2 processes)"
        ]
        assert not (played / "three").exists()

    def test_so_are_ranks_with_other_numbers_of_threads(self, played: Path) -> None:
        assert [of(played, "unlike", rank)["code"] for rank in range(2)] == [2, 2]
        assert "(runtime.threads = 2, not 1)" in of(played, "unlike", 0)["err"]


class TestThreads:
    def test_those_of_the_first_start_are_kept(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        flags = FLAGS | {"steps": 1, "runtime.threads": "None"}
        assert command(["train", *arguments(folder, "threads", flags)])[0] == 0
        stored = json.loads((folder / "threads" / "config.json").read_text())
        assert stored["runtime"]["threads"] == 1
        code, _, said = command(["train", "--resume", folder / "threads", "--runtime.threads", "2"])
        assert code == 2
        assert f"{folder / 'threads'} has another configuration: runtime.threads: 1 vs 2; leave it out" in said

    def test_otherwise_they_are_not(self, folder: Path) -> None:
        run = train(folder, "free", steps=1, runtime__threads=None)
        assert json.loads((run / "config.json").read_text())["runtime"]["threads"] is None


class TestKernels:
    @pytest.mark.parametrize(
        ("device", "gpu", "wanted"), [("cpu", True, False), ("auto", False, False), ("auto", True, True)]
    )
    def test_deterministic_ones_are_for_gpus(
        self, device: str, gpu: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
        with deterministic_kernels(device):
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == ("1" if wanted else None)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's choice, which is one too
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("compiled", ["off", "on"])
    def test_the_same_run_twice_on_a_gpu(self, folder: Path, compiled: str) -> None:
        flags = FLAGS | {"runtime.device": "cuda", "runtime.dtype": "bfloat16", "runtime.compile": compiled}
        names = [f"gpu-{compiled}-{number}" for number in range(2)]
        for name in names:
            # In processes of their own: what the environment says of kernels is read once.
            subprocess.run([sys.executable, "-m", "gptlab", "train", *arguments(folder, name, flags)], check=True)
        one, other = (outcome(folder / name) for name in names)
        assert differences(one, other) == []
