"""Checkpoints that several processes write together: whole tensors come back, whoever held which elements."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_checkpoint import flip, same_bits, save_small, small_contents, tree
from safetensors.torch import load_file
from torch import Tensor

from gptlab.training.checkpoint.format import (
    CheckpointError,
    DamagedCheckpointError,
    TensorSlice,
    even_slices,
    file_name,
)
from gptlab.training.checkpoint.load import load_checkpoint, verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.write import begin_save, complete_save, write_part

Tensors = dict[str, Tensor]


def contents(seed: int) -> dict[str, Tensors]:
    """All kinds of shapes, one name twice, and as many types as a run has."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        "table": torch.randn(7, 5, generator=generator),
        "scale": torch.randn((), generator=generator),
        "none": torch.empty(0, 3),
        "wide": torch.randn(3, 4, 2, generator=generator, dtype=torch.float64),
    }
    other = {"table": torch.randn(7, 5, generator=generator).bfloat16(), "rng": torch.arange(9, dtype=torch.uint8)}
    return {"model": model, "optimizer": other}


def whole(tensors: Tensors, rank: int, size: int) -> list[TensorSlice]:
    """Rank 0 writes everything."""
    return even_slices(tensors, 0, 1) if rank == 0 else []


def by_tensor(tensors: Tensors, rank: int, size: int) -> list[TensorSlice]:
    """Every rank writes whole tensors of its own."""
    return [TensorSlice(name, tuple(t.shape), 0, t) for i, (name, t) in enumerate(tensors.items()) if i % size == rank]


def by_rows(tensors: Tensors, rank: int, size: int) -> list[TensorSlice]:
    """What FSDP2 does: each tensor's rows are cut alike; some ranks get nothing of a short one."""
    pieces = []
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.numel() == 0:
            pieces += whole({name: tensor}, rank, size)
            continue
        rows = -(-len(tensor) // size)
        part = tensor[rank * rows : (rank + 1) * rows]
        if part.numel():
            pieces.append(TensorSlice(name, tuple(tensor.shape), rank * rows * tensor[0].numel(), part))
    return pieces


def turn_about(tensors: Tensors, rank: int, size: int) -> list[TensorSlice]:
    """Single elements, so that every rank has many pieces of every tensor."""
    return [
        TensorSlice(name, tuple(tensor.shape), start, tensor.reshape(-1)[start : start + 1])
        for name, tensor in tensors.items()
        for start in range(rank, max(tensor.numel(), 1), size)
    ]


CUTS: dict[str, Callable[[Tensors, int, int], Sequence[TensorSlice]]] = {
    "even": even_slices, "whole": whole, "by-tensor": by_tensor, "by-rows": by_rows, "turn-about": turn_about,
}  # fmt: skip


def save(folder: Path, step: int, size: int, cut: str = "even", seed: int | None = None) -> Path:
    tensors = contents(step if seed is None else seed)
    temporary = begin_save(folder, step, needed_bytes=100)
    for rank in reversed(range(size)):  # the order is nobody's business
        pieces = {kind: CUTS[cut](tensors[kind], rank, size) for kind in tensors}
        write_part(temporary, pieces["model"], pieces["optimizer"], rank=rank, size=size)
    return complete_save(temporary, {"step": step}, size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 60])
@pytest.mark.parametrize("cut", CUTS)
def test_whatever_the_pieces_the_tensors_come_back(tmp_path: Path, cut: str, size: int) -> None:
    """60 ranks are more than there are elements for."""
    path = save(tmp_path, 10, size, cut)
    verify_checkpoint(path)
    loaded, expected = load_checkpoint(path), contents(10)
    assert same_bits(loaded.model, expected["model"])
    assert same_bits(loaded.optimizer, expected["optimizer"])
    assert loaded.state == {"step": 10}
    files = {file_name(kind, rank, size) for kind in expected for rank in range(size)}
    assert {entry.name for entry in path.iterdir()} == files | {"state.json", "manifest.json"}


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    path = save(tmp_path, 10, 2)
    table = contents(10)["model"]["table"]
    stored = [load_file(path / f"model-0000{rank}-of-00002.safetensors") for rank in (1, 2)]
    # 35 + 1 + 0 + 24 elements: 30 for each.
    assert torch.equal(stored[0]["table@0"], table.reshape(-1)[:30])
    assert torch.equal(stored[1]["table@30"], table.reshape(-1)[30:])
    assert [sorted(names) for names in stored] == [["none", "table@0"], ["scale", "table@30", "wide"]]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["model"]["table"] == {
        "dtype": "F32", "shape": [7, 5],
        "pieces": [["model-00001-of-00002.safetensors", 0, 30], ["model-00002-of-00002.safetensors", 30, 5]],
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_even_shares_tile_everything(size: int) -> None:
    tensors = {"a": torch.arange(7), "b": torch.zeros(()), "c": torch.arange(24).reshape(4, 6)}
    shares = [even_slices(tensors, rank, size) for rank in range(size)]
    counts = [sum(piece.tensor.numel() for piece in share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for name, tensor in tensors.items():
        found = [piece for share in shares for piece in share if piece.name == name]
        assert torch.equal(torch.cat([piece.tensor.reshape(-1) for piece in found]), tensor.reshape(-1))
        assert all(piece.tensor.data_ptr() == tensor.view(-1)[piece.start :].data_ptr() for piece in found)


def test_version_1_reads(tmp_path: Path) -> None:
    """The folder that the version before wrote: three files, and no index."""
    path = save_small(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["model"], manifest["optimizer"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 1}))
    verify_checkpoint(path)
    assert same_bits(load_checkpoint(path).model, small_contents(10)["model"])
    assert same_bits(load_checkpoint(path).optimizer, small_contents(10)["optimizer"])
    assert load_checkpoint(path).state == small_contents(10)["state"]


# --- damage -----------------------------------------------------------------------------------------------------------

FILES = [*(file_name(kind, rank, 3) for kind in ("model", "optimizer") for rank in range(3)), "state.json"]


@pytest.mark.parametrize("harm", ["flip", "cut", "zeros", "gone", "of another checkpoint", "another rank's"])
def test_each_damaged_file_is_named(tmp_path: Path, harm: str) -> None:
    good, other = save(tmp_path, 10, 3), save(tmp_path, 20, 3, seed=11)
    for name in FILES:
        path = tmp_path / "copy"
        shutil.copytree(good, path)
        verify_checkpoint(path)
        harmed = path / name
        content = harmed.read_bytes()
        if harm == "flip":
            flip(harmed)
        elif harm == "gone":
            harmed.unlink()
        elif harm == "of another checkpoint":
            shutil.copy(other / name, harmed)
        elif harm == "another rank's":
            shutil.copy(good / FILES[FILES.index(name) - 1], harmed)
        else:
            harmed.write_bytes(content[:-1] if harm == "cut" else b"\0" * len(content))
        for check in (load_checkpoint, verify_checkpoint):
            with pytest.raises(DamagedCheckpointError, match=name):
                check(path)
        shutil.rmtree(path)


HUGE = 2**62
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pieces": [[ONE, 0, 30], [TWO, 29, 6]]}, "overlaps"),
        ({"pieces": [[ONE, 0, 35], [TWO, 30, 5]]}, "overlaps"),
        ({"pieces": [[ONE, 0, 29], [TWO, 30, 5]]}, "gap"),
        ({"pieces": [[TWO, 30, 5], [ONE, 0, 30]]}, "gap"),
        ({"pieces": [[ONE, 0, 30]]}, "30 elements in all, its shape 35"),
        ({"pieces": [[ONE, 0, 30], [TWO, 30, 6]]}, "36 elements"),
        ({"pieces": [[ONE, 0, 30], [TWO, 30, 5], [TWO, 35, 0]]}, "empty"),
        ({"pieces": []}, "0 elements"),
        ({"pieces": [["../../secret", 0, 30], [TWO, 30, 5]]}, "malformed"),
        ({"pieces": [["optimizer-00001-of-00002.safetensors", 0, 30], [TWO, 30, 5]]}, "malformed"),
        ({"pieces": [[[], 0, 30], [TWO, 30, 5]]}, "malformed"),
        ({"pieces": [[ONE, 0.0, 30], [TWO, 30, 5]]}, "malformed"),
        ({"pieces": [[ONE, -5, 35], [TWO, 30, 5]]}, "malformed"),
        ({"shape": [HUGE, HUGE]}, "impossible"),
        ({"shape": [HUGE, 0]}, "impossible"),
        ({"shape": [10**9, 10**3], "pieces": [[ONE, 0, 10**12]]}, "bytes"),
        ({"shape": [1] * 65}, "impossible"),
        ({"shape": [-7, -5]}, "malformed"),
        ({"shape": [5, 7]}, None),  # as many elements, and no file says otherwise
        ({"shape": [True, 35]}, "malformed"),
        ({"dtype": "I32"}, ONE),
        ({"dtype": "F64"}, "table"),
        ({"dtype": "object"}, "malformed"),
        ({"more": 1}, "malformed"),
    ],
)
def test_an_index_that_cannot_be_is_damage(tmp_path: Path, fields: dict[str, Any], reason: str | None) -> None:
    path = save(tmp_path, 10, 2)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["model"]["table"] |= fields
    (path / "manifest.json").write_text(json.dumps(manifest))
    if reason is None:
        assert load_checkpoint(path).model["table"].shape == (5, 7)
        return
    started = time.process_time()
    for check in (load_checkpoint, verify_checkpoint):
        with pytest.raises(DamagedCheckpointError, match=reason):
            check(path)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("change", ["a tensor less", "a tensor more", "a rank less", "no index"])
def test_index_and_files_must_agree(tmp_path: Path, change: str) -> None:
    path = save(tmp_path, 10, 2)
    manifest = json.loads((path / "manifest.json").read_bytes())
    if change == "a tensor less":
        del manifest["model"]["scale"]
    elif change == "a tensor more":
        manifest["model"]["scale2"] = manifest["model"]["scale"]
    elif change == "a rank less":
        del manifest["files"][TWO]
    else:
        del manifest["optimizer"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    for check in (load_checkpoint, verify_checkpoint):
        with pytest.raises(DamagedCheckpointError):
            check(path)


# --- saves that do not come to their end ------------------------------------------------------------------------------


def test_a_rank_that_never_wrote_leaves_no_checkpoint(tmp_path: Path) -> None:
    temporary = begin_save(tmp_path, 10, needed_bytes=1)
    pieces = even_slices(contents(1)["model"], 0, 2)
    write_part(temporary, pieces, [], rank=0, size=2)
    assert list_checkpoints(tmp_path) == []
    # What a rank that died leaves is gone with the next save ...
    assert begin_save(tmp_path, 20, needed_bytes=1).exists()
    assert not temporary.exists()
    # ... and one that is taken for complete all the same is refused, and leaves nothing.
    with pytest.raises(CheckpointError, match="step 20"):
        complete_save(tmp_path / begin_save(tmp_path, 20, needed_bytes=1).name, {}, size=2)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("harm", ["a gap", "twice", "two shapes"])
def test_pieces_that_do_not_tile_are_refused_by_the_writer(tmp_path: Path, harm: str) -> None:
    temporary = begin_save(tmp_path, 10, needed_bytes=1)
    ones = torch.ones(6)
    for rank in range(2):
        shape = (2, 3) if harm == "two shapes" and rank else (6,)
        start = {"a gap": 4 * rank, "twice": 0, "two shapes": 3 * rank}[harm]
        write_part(temporary, [TensorSlice("x", shape, start, ones[:3])], [], rank=rank, size=2)
    with pytest.raises(ValueError, match="'x'"):
        complete_save(temporary, {}, size=2)
    assert tree(tmp_path) == {}


def test_no_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No space left"):
        begin_save(tmp_path, 10, needed_bytes=2**62)
    assert tree(tmp_path) == {}
