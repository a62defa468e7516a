"""Several ranks read a checkpoint: each byte is verified by one of them, and each reads what it needs.

The ranks are threads, which tell each other what they found through a store, as processes do."""

from __future__ import annotations

import io
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from oracle_checkpoint import flip, same_bits
from torch import Tensor

from gptlab.config.errors import UserError
from gptlab.runtime.files import tensor_file
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.processes.liveness import Liveness
from gptlab.runtime.processes.torch_group import TorchGroup
from gptlab.training.checkpoint.format import DamagedCheckpointError, even_slices, whole_slices
from gptlab.training.checkpoint.load import Checkpoint, load_checkpoint, load_newest
from gptlab.training.checkpoint.write import begin_save, complete_save, write_part

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` returns or raises on each of `size` ranks at the same time."""
    store, answers = dist.HashStore(), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            answers[rank] = work(TorchGroup(World(rank, size), Liveness(rank, size, store), store))
        except UserError as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [answers[rank] for rank in range(size)]


def contents(step: int, rows: int = 6) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{i}": torch.randn(rows, 5, generator=generator) for i in range(8)} | {"scale": torch.tensor(0.5)}
    moments = {
        f"{name}.{kind}": torch.randn(w.shape, generator=generator) for name, w in weights.items() for kind in "ab"
    }
    return {"model": weights, "optimizer": moments | {"rng.torch": torch.arange(9, dtype=torch.uint8)}}


def save(folder: Path, step: int, size: int, rows: int = 6) -> Path:
    tensors = contents(step, rows)
    temporary = begin_save(folder, step, needed_bytes=100)
    for rank in range(size):
        parts = [even_slices(tensors[kind], rank, size) for kind in ("model", "optimizer")]
        write_part(temporary, *parts, rank=rank, size=size)
    return complete_save(temporary, {"step": step}, size=size)


@pytest.mark.parametrize(("saved_by", "size"), [(1, 2), (2, 2), (4, 3), (3, 4), (2, 8)])
def test_what_is_read_in_parts_is_what_was_saved(tmp_path: Path, saved_by: int, size: int) -> None:
    path, expected = save(tmp_path, 10, saved_by), contents(10)

    def work(group: Group) -> tuple[dict[str, Tensor], list[bool]]:
        found = load_newest(tmp_path, pytest.fail, group)
        assert (found.step, found.state, found.path) == (10, {"step": 10}, path)
        copies = {name: torch.empty_like(tensor) for name, tensor in expected["model"].items()}
        for name, copy in copies.items():
            copy.copy_(found.model[name])
        assert found.optimizer["rng.torch"].cpu().tolist() == list(range(9))
        own = even_slices(expected["optimizer"], group.rank, size)
        return copies, [torch.equal(one.of(found.optimizer[one.name]), one.tensor) for one in own]

    for copies, parts in on_ranks(size, work):
        assert same_bits(copies, expected["model"])
        assert all(parts)
        assert parts


class CountingReader(io.BufferedReader):
    """Counts the bytes that each thread reads."""

    counts: Counter[int]

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.counts[threading.get_ident()] += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.counts[threading.get_ident()] += count
        return count


@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_rank_reads_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """To verify, a part of all; then the weights, which all ranks hold, and a part of the moments."""
    path, counts = save(tmp_path, 10, size, rows=500), Counter[int]()
    monkeypatch.setattr(CountingReader, "counts", counts, raising=False)
    monkeypatch.setattr(tensor_file, "open_plain", lambda name: CountingReader(io.FileIO(name)))
    expected = contents(10, rows=500)
    weights, moments = (sum(tensor.nbytes for tensor in expected[kind].values()) for kind in ("model", "optimizer"))

    def work(group: Group) -> tuple[int, int]:
        found = load_newest(tmp_path, pytest.fail, group)
        verified = counts[threading.get_ident()]
        for one in [*whole_slices(expected["model"]), *even_slices(expected["optimizer"], group.rank, size)]:
            one.of((found.model | found.optimizer)[one.name])
        return verified, counts[threading.get_ident()] - verified

    # Headers, twice for what is verified, and state.json.
    headers = sum(file.stat().st_size for file in path.iterdir() if file.suffix == ".safetensors") - weights - moments
    for verified, read in on_ranks(size, work):
        assert abs(verified - (weights + moments) / size) <= headers + 100
        assert abs(read - (weights + moments / size)) <= headers + 100
    assert headers < (weights + moments) / size / 5, "they do not hide a share"


@pytest.mark.parametrize("number", range(7))
def test_damage_that_one_rank_finds_is_known_to_all(tmp_path: Path, number: int) -> None:
    """In each of the files, whoever verifies it: one line, and the checkpoint before."""
    save(tmp_path, 10, 3)
    path = save(tmp_path, 20, 3)
    files = sorted(file for file in path.iterdir() if file.name != "manifest.json")
    assert len(files) == 7
    flip(files[number])
    with pytest.raises(DamagedCheckpointError) as alone:
        load_checkpoint(path)

    def work(group: Group) -> tuple[int, list[str]]:
        lines: list[str] = []
        return load_newest(tmp_path, lines.append, group).step, lines

    assert on_ranks(3, work) == [(10, [str(alone.value)])] * 3


@pytest.mark.parametrize("file", ["model-00001-of-00002", "model-00002-of-00002", "optimizer-00002-of-00002"])
def test_a_rank_with_a_copy_verifies_all_of_it(tmp_path: Path, file: str) -> None:
    """Otherwise nobody would verify what another rank verified in its own folder."""
    save(tmp_path / "shared", 20, 2)
    shutil.copytree(tmp_path / "shared", tmp_path / "copy")
    flip(tmp_path / "copy" / "step-00000020" / f"{file}.safetensors")

    def work(group: Group) -> Checkpoint:
        return load_newest(tmp_path / ("copy" if group.rank == 1 else "shared"), lambda line: None, group)

    for error in on_ranks(3, work):
        assert isinstance(error, UserError)
        assert f"step-00000020: {file}.safetensors: content has changed" in str(error)


def test_what_is_lost_after_it_was_verified_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 10, 2)

    def work(group: Group) -> None:
        found = load_newest(tmp_path, pytest.fail, group)
        group.barrier("verified")
        if group.is_main:
            (path / "optimizer-00002-of-00002.safetensors").unlink()
        group.barrier("removed")
        found.optimizer["rng.torch"].cpu()

    for error in on_ranks(2, work):
        assert isinstance(error, DamagedCheckpointError)
        assert "optimizer-00002-of-00002.safetensors cannot be read (No such file or directory)" in str(error)
