"""Several copies of sharded weights: which part each saves, and that one which differs is found."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptlab.config.model import ModelConfig
from gptlab.config.run import RunConfig, RuntimeConfig
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.processes.torch_group import TorchGroup
from gptlab.training.checkpoint.format import TensorSlice
from gptlab.training.checkpoint.load import checksum
from gptlab.training.faults import TrainingFailed
from gptlab.training.parallel import fsdp
from gptlab.training.parallel.agreement import require_equal_weights
from gptlab.training.parallel.fsdp_copies import OneCopy


def test_copies_save_every_element_once() -> None:
    """Three copies of two ranks, which hold rows 0 to 3 and 4 to 6 of a table, and the first one a vector too."""
    table, vector = torch.arange(35.0).view(7, 5), torch.arange(4.0)
    saved: dict[str, list[tuple[int, Tensor]]] = {"table": [], "vector": []}
    counts = []
    for rank in range(6):
        copy = OneCopy(Group(World(rank, 6)), 2)
        rows = table[:4] if copy.is_main else table[4:]
        held = [TensorSlice("table", (7, 5), 0 if copy.is_main else 20, rows)]
        held += [TensorSlice("vector", (4,), 0, vector)] if copy.is_main else []
        parts = copy.share(held)
        counts.append(sum(part.count for part in parts))
        for part in parts:
            saved[part.name].append((part.start, part.tensor.reshape(-1)))
    for whole, pieces in ((table, saved["table"]), (vector, saved["vector"])):
        together = torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0])])
        assert torch.equal(together, whole.reshape(-1))
    assert sorted(counts) == [5, 5, 5, 8, 8, 8]


def test_their_collectives_may_take_as_long_as_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit would end them at 10 minutes with NCCL, whatever runtime.process_timeout_seconds is."""
    limits = {}
    mesh = SimpleNamespace(get_all_groups=lambda: ["within a copy", "over copies"])
    monkeypatch.setattr(fsdp, "make_mesh", lambda *_: mesh)
    monkeypatch.setattr(fsdp, "shard_model", lambda *_: None)
    monkeypatch.setattr(fsdp, "load_kernels", lambda *_: None)
    monkeypatch.setattr(fsdp, "_set_pg_timeout", lambda timeout, group: limits.update({group: timeout}))
    model = ModelConfig(vocab_size=64, vocab_multiple=32, n_layer=1, n_embd=32, n_head=1, seq_len=16)
    config = RunConfig(model=model, runtime=RuntimeConfig(process_timeout_seconds=3600.0))
    copies: Any = SimpleNamespace(_copy=OneCopy(Group(World(0, 4)), 2))
    fsdp.Fsdp._build(copies, config, 4, torch.device("cpu"), torch.float32)
    assert limits == dict.fromkeys(("within a copy", "over copies"), timedelta(seconds=3660))


class RankOne(Group):
    """Of four that all have the same vectors, and each its rows: one number."""

    def __init__(self, rows: list[float]) -> None:
        super().__init__(World(1, 4))
        vectors = [torch.ones(3)]
        self.weights = [(1, vectors), (2, [torch.tensor(rows[1])])]
        self.checksums = [[checksum(vectors)] * 4, [checksum([torch.tensor(number)]) for number in rows]]

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        return tensor.copy_(torch.tensor(self.checksums.pop(0)))

    all_agree = TorchGroup.all_agree  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("rows", "says"),
    [([5.0, 7.0, 5.0, 8.0], "rank 3's weights differ from rank 1's"), ([5.0, 7.0, 6.0, 7.0], "rank 2's .* rank 0's")],
)
def test_a_copy_that_differs_is_found(rows: list[float], says: str) -> None:
    """Of four ranks that have the same vectors, every second one has the same rows."""

    def check(rows: list[float]) -> None:
        group = RankOne(rows)
        strategy: Any = SimpleNamespace(group=group, equal_weights=lambda: group.weights)
        require_equal_weights(strategy, 9)

    check([5.0, 7.0, 5.0, 7.0])
    with pytest.raises(TrainingFailed, match=f"after step 9, {says}"):
        check(rows)
