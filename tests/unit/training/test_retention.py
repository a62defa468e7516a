from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from oracle_checkpoint import save_small, tree

from gptlab.training.checkpoint.format import DamagedCheckpointError
from gptlab.training.checkpoint.load import load_newest, verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.retention import retain


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention flushes nothing; the many saves that set these tests up need not either."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


def filled(folder: Path, *some_steps: int) -> Path:
    for step in some_steps:
        save_small(folder, step)
    return folder


def damage(path: Path, *, in_place: bool) -> None:
    """In place: same size, other content, which only a full verification finds."""
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if in_place:
        content[-1] ^= 1
    else:
        content.pop()
    weights.write_bytes(content)


@pytest.mark.parametrize(
    ("keep_last", "keep_every_steps", "best_step", "kept"),
    [
        (1, None, None, [60]),
        (2, None, None, [50, 60]),
        (9, None, None, [10, 20, 30, 40, 50, 60]),
        (1, 20, None, [20, 40, 60]),
        (1, 25, None, [50, 60]),
        (1, 7, None, [60]),
        (1, None, 30, [30, 60]),
        (1, None, 60, [60]),
        (1, None, 35, [60]),
        (2, 20, 10, [10, 20, 40, 50, 60]),
    ],
)
def test_the_rules(
    tmp_path: Path, keep_last: int, keep_every_steps: int | None, best_step: int | None, kept: list[int]
) -> None:
    before = filled(tmp_path, 10, 20, 30, 40, 50, 60)
    expected_removed = [path for path in list_checkpoints(before) if int(path.name[5:]) not in kept]
    removed = retain(tmp_path, keep_last=keep_last, keep_every_steps=keep_every_steps, best_step=best_step)
    assert removed == expected_removed
    assert steps(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == len(kept), "no leftovers"
    assert retain(tmp_path, keep_last=keep_last, keep_every_steps=keep_every_steps, best_step=best_step) == []


def test_step_zero_is_a_multiple_of_everything(tmp_path: Path) -> None:
    filled(tmp_path, 0, 10, 20)
    retain(tmp_path, keep_last=1, keep_every_steps=1000, best_step=None)
    assert steps(tmp_path) == [0, 20]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        retain(tmp_path, keep_last=0, keep_every_steps=None, best_step=None)


@pytest.mark.parametrize("folder", [".", "not there"])
def test_nothing_there_is_nothing_to_do(tmp_path: Path, folder: str) -> None:
    assert retain(tmp_path / folder, keep_last=1, keep_every_steps=None, best_step=None) == []


@pytest.mark.parametrize("in_place", [False, True], ids=["cut short", "altered in place"])
def test_a_damaged_newest_one_holds_no_place_and_stays(tmp_path: Path, in_place: bool) -> None:
    filled(tmp_path, 10, 20, 30, 40)
    damage(tmp_path / "step-00000040", in_place=in_place)
    retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None)
    assert steps(tmp_path) == [30, 40]
    assert load_newest(tmp_path, lambda line: None).path.name == "step-00000030"


def test_one_that_is_known_to_be_damaged_holds_no_place_and_stays(tmp_path: Path) -> None:
    """Its size is right, and it is not the newest: nobody reads it again."""
    filled(tmp_path, 5, 10, 13, 15)
    damage(tmp_path / "step-00000013", in_place=True)
    retain(tmp_path, keep_last=2, keep_every_steps=None, best_step=None, damaged_steps={13})
    assert steps(tmp_path) == [10, 13, 15]
    retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=13, damaged_steps={13})
    assert steps(tmp_path) == [13, 15]


def test_all_damaged_and_nothing_goes(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30)
    for path in list_checkpoints(tmp_path):
        damage(path, in_place=True)
    before = tree(tmp_path)
    assert retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None) == []
    assert tree(tmp_path) == before


def test_never_fewer_than_one_intact(tmp_path: Path) -> None:
    """Whatever is damaged and whatever is asked for: where one was intact before, one is after."""
    source = random.Random(5)
    for trial in range(25):
        folder = filled(tmp_path / str(trial), *range(1, source.randint(2, 5)))
        for path in list_checkpoints(folder):
            if source.random() < 0.5:
                damage(path, in_place=source.random() < 0.7)
        before = intact(folder)
        retain(
            folder,
            keep_last=source.randint(1, 3),
            keep_every_steps=source.choice([None, 2, 3]),
            best_step=source.choice([None, 1, 2, 3]),
        )
        after = intact(folder)
        assert after <= before
        assert bool(after) == bool(before)
        if before:
            assert max(after) == max(before), "the newest intact one always stays"


def intact(folder: Path) -> set[Path]:
    found = set()
    for path in list_checkpoints(folder):
        try:
            verify_checkpoint(path)
        except DamagedCheckpointError:
            continue
        found.add(path)
    return found


def test_strangers_stay(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000001").symlink_to(tmp_path / "step-00000010", target_is_directory=True)
    retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt", "step-00000001", "step-00000005", "step-00000020"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_removed_stays_whole_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 10, 20, 30)
    real = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "step-00000010":
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    lines: list[str] = []
    removed = retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None, on_problem=lines.append)
    assert [path.name for path in removed] == ["step-00000020"]
    assert steps(tmp_path) == [10, 30]
    verify_checkpoint(tmp_path / "step-00000010")
    assert lines == [f"cannot remove the old checkpoint {tmp_path / 'step-00000010'}: Permission denied"]


def test_a_removal_that_was_cut_short_is_finished_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 10, 20)
    with monkeypatch.context() as patch:

        def refuse(*arguments: object, **keywords: object) -> None:
            raise PermissionError(13, "Permission denied")

        patch.setattr(os, "unlink", refuse)
        retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None)
    assert steps(tmp_path) == [20]
    assert len(list(tmp_path.iterdir())) == 2, "the remains"
    save_small(tmp_path, 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
