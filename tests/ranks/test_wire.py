"""What may change about how gradients and weights travel without a bit of the run changing: the order of buckets, and
tables in bfloat16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_scenes import free_ports
from forked import Forked
from oracle_checkpoint import same_bits
from torch import Tensor

from gptlab.app.run.ranks import exit_code
from gptlab.config.model import ModelConfig
from gptlab.config.run import RunConfig
from gptlab.model.gpt import GPT, build_model
from gptlab.runtime.hardware.device import deterministic_kernels, resolve_device
from gptlab.runtime.processes.distributed import Group, World
from gptlab.runtime.processes.torch_group import TorchGroup, join_others
from gptlab.training.checkpoint.load import checksum, load_checkpoint
from gptlab.training.checkpoint.write import begin_save, complete_save, write_part
from gptlab.training.parallel.division import WIRES, Wire
from gptlab.training.parallel.zero import Zero, rounded_tables

CPU = torch.device("cpu")
PLAIN = Wire(20_000)
GPUS = Wire(20_000, measured_order=True, bfloat16_tables=True)


def model_of(dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU, **changes: Any) -> GPT:
    config = ModelConfig(**{"vocab_size": 96, "n_embd": 32, "seq_len": 16, "n_layer": 4, "n_head": 2} | changes)
    return build_model(config, device=device, compute_dtype=dtype, seed=1)


def tokens_of(step: int, rank: int, device: torch.device) -> Tensor:
    return torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def train(wire: Wire, folder: Path, group: Group, device: torch.device) -> dict[str, Any]:
    """Three steps after a warm-up, and a checkpoint. What each bucket held, the bytes that left, and every loss."""
    model = model_of(device=device)
    zero, sent = Zero(model, RunConfig(), group, wire=wire), Counter[str]()
    tokens = tokens_of(0, group.rank, device)
    model.loss(tokens, tokens).backward()
    if group.is_main:  # as if the head's gradient were the last one to arrive there
        model.head_loss(torch.zeros(2, 16, 32, dtype=torch.bfloat16, device=device), tokens).backward()
    zero.zero_grad()
    used = zero.after_warm_up()
    losses, reduce_scatter, all_gather = [], group.reduce_scatter_later, group.all_gather_later

    def counting_reduce(own: Tensor, flat: Tensor, what: str) -> Callable[[], None]:
        sent["gradients"] += flat.nbytes
        return reduce_scatter(own, flat, what)

    def counting_gather(flat: Tensor, own: Tensor, what: str) -> Callable[[], None]:
        sent["weights"] += flat.nbytes
        return all_gather(flat, own, what)

    group.reduce_scatter_later, group.all_gather_later = counting_reduce, counting_gather  # type: ignore[method-assign]
    for step in range(1, 4):
        tokens = tokens_of(step, group.rank, device)
        zero.before_backward(True)
        loss = model.loss(tokens, tokens)
        loss.backward()
        losses.append(zero.finish_reduction(loss.detach().double()).item().hex())
        losses.append(zero.total_norm([p.grad for p in zero.updated_weights() if p.grad is not None]).item().hex())
        zero.step(1.0, 0.9, 1.0)
        zero.zero_grad()
    group.reduce_scatter_later, group.all_gather_later = reduce_scatter, all_gather  # type: ignore[method-assign]
    temporary = begin_save(folder, 3, needed_bytes=1) if group.is_main else None
    temporary = Path(group.broadcast("temporary", temporary and str(temporary)))
    write_part(temporary, zero.weight_slices(), zero.moment_slices(), rank=group.rank, size=group.size)
    group.barrier("written")
    if group.is_main:
        complete_save(temporary, {}, size=group.size)
    assert group.all_agree(checksum(zero.replicated_weights()), "weights") == []
    masters = {name: p for name, p in model.named_parameters() if not torch.equal(p, p.bfloat16().float())}
    return {
        "order": [sorted(bucket.names) for bucket in zero.division.gradients], "sent": sent, "losses": losses,
        "used": used, "masters": sorted(masters),
    }  # fmt: skip


def work(folder: Path, size: int, rank: int, device_name: str) -> None:
    """Every way to travel, on one rank."""
    world = World(rank, size, rank, size)
    device = resolve_device(device_name, rank)
    with deterministic_kernels(device_name), join_others(world, exit_code) as group:
        assert isinstance(group, TorchGroup)
        group.start_collectives(device, timeout_seconds=60.0)
        ways = {"plain": PLAIN, "measured": Wire(20_000, measured_order=True), "gpus": GPUS}
        found = {name: train(wire, folder / name, group, device) for name, wire in ways.items()}
        (folder / f"{rank}.json").write_text(json.dumps(found))


def start(folder: Path, size: int, rank: int, device: str, job: dict[str, str]) -> Forked | subprocess.Popen[str]:
    """One rank. On GPUs in an interpreter of its own: a fork of a process that has looked for one cannot use it."""
    if device == "cpu":
        return Forked(partial(work, folder, size, rank, device), **job)
    code = f"import pathlib, test_wire; test_wire.work(pathlib.Path({str(folder)!r}), {size}, {rank}, {device!r})"
    environment = os.environ | job | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def play(folder: Path, size: int, device: str = "cpu") -> list[dict[str, Any]]:
    """What each rank found."""
    (port,) = free_ports(1)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start(folder, size, rank, device, job) for rank in range(size)]
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module", params=[3])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    if sys.platform != "linux":
        pytest.skip("gloo on loopback is tried on Linux")
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    return folder, play(folder, request.param)


def test_no_bit_changes(played: tuple[Path, list[Any]]) -> None:
    """Losses, norms, and the checkpoint: weights, which are saved by their owners, and moments."""
    folder, ranks = played
    saved = {way: load_checkpoint(folder / way / "step-00000003") for way in ranks[0]}
    for way in ("measured", "gpus"):
        assert all(rank[way]["losses"] == ranks[0]["plain"]["losses"] for rank in ranks)
        assert same_bits(saved[way].model, saved["plain"].model)
        assert same_bits(saved[way].optimizer, saved["plain"].optimizer)
    assert len(set(ranks[0]["plain"]["losses"])) == 6


def test_buckets_leave_in_the_order_that_rank_0_measured(played: tuple[Path, list[Any]]) -> None:
    _, ranks = played
    orders = [rank["gpus"]["order"] for rank in ranks]
    assert all(order == orders[0] for order in orders)
    assert orders[0] == ranks[0]["measured"]["order"] != ranks[0]["plain"]["order"]
    assert "head.weight" in orders[0][-1]
    assert "head.weight" in ranks[0]["plain"]["order"][0]
    assert ranks[0]["plain"]["used"] == {}
    assert len({rank[way]["used"]["gradients"] for rank in ranks for way in ("measured", "gpus")}) == 1


def test_tables_take_half_the_bytes(played: tuple[Path, list[Any]]) -> None:
    _, ranks = played
    tables = sum(p.numel() for name, p in model_of().named_parameters() if name in rounded_tables(model_of()))
    for rank in ranks:
        plain, measured, gpus = (rank[way]["sent"]["weights"] for way in ("plain", "measured", "gpus"))
        assert plain == measured
        padding = 3 * 2 * len(ranks) * len(model_of().value_embeddings)
        assert 3 * 2 * tables <= plain - gpus <= 3 * 2 * tables + padding
        assert "token_embedding.weight" in rank["gpus"]["masters"], "its own rows are still float32"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: a CUDA device for each rank")
def test_nccl_does_what_gloo_does(tmp_path: Path) -> None:
    """Two ranks: the order is that of rank 0's queue, tables travel in bfloat16, and no loss changes."""
    ranks = play(tmp_path, 2, "cuda")
    test_no_bit_changes((tmp_path, ranks))
    test_tables_take_half_the_bytes((tmp_path, ranks))


def test_a_value_table_gets_its_gradient_with_its_block() -> None:
    """Most weights of nanochat are in these tables: if all their gradients came last, nothing would hide their way."""
    model, arrived = model_of(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    tokens = tokens_of(1, 0, CPU)
    model.loss(tokens, tokens).backward()
    place = arrived.index
    assert place("blocks.3.mlp.out.weight") < place("value_embeddings.3.weight") < place("blocks.2.mlp.out.weight")
    assert place("blocks.1.mlp.out.weight") < place("value_embeddings.1.weight") < place("blocks.0.mlp.out.weight")


@pytest.mark.parametrize("changes", [{}, {"embedding_norm": False}, {"tied_head": True}, {"position": "learned"}])
def test_models_read_only_the_rounding_of_these_tables(changes: dict[str, Any]) -> None:
    """Rounded, they give the same bits of loss and gradients; the token table does not where positions are added."""
    model, tokens = model_of(**changes), tokens_of(1, 0, CPU)

    def outcome() -> list[Tensor]:
        model.zero_grad()
        loss = model.loss(tokens, tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    before, tables = outcome(), rounded_tables(model)
    assert any(name.startswith("value_embeddings") for name in tables)
    assert ("token_embedding.weight" in tables) == (changes.keys() <= {"embedding_norm"})
    for name in tables:
        parameter = model.get_parameter(name)
        assert not torch.equal(parameter, parameter.bfloat16().float())
        parameter.data.copy_(parameter.bfloat16())
    assert all(torch.equal(one, other) for one, other in zip(before, outcome(), strict=True))
    if "position" in changes:
        table = model.token_embedding.weight
        table.data.copy_(table.bfloat16())
        assert not all(torch.equal(one, other) for one, other in zip(before, outcome(), strict=True))


def test_the_platform_decides() -> None:
    group = Group(World(0, 2))
    for platform, dtype in (("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float32)):
        config = ModelConfig(vocab_size=96, n_embd=32, seq_len=16, n_layer=4, n_head=2)
        with torch.device("meta"):
            model = GPT(config, dtype, platform)
        zero = Zero(model, RunConfig(), group)
        assert bool(zero._narrow) == (platform == "cuda" and dtype == torch.bfloat16)
        assert (zero._arrived is None) == (platform == "cpu")
    assert 64 * 2**20 <= WIRES["cuda"].bucket_bytes <= 128 * 2**20
    assert Wire() == Wire(25 * 2**20, measured_order=False, bfloat16_tables=False)
