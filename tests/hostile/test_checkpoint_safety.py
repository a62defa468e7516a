"""Saves that replace, are refused, or are killed: what stood before them stands after them."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import pytest
import torch
from forked import run_forked
from oracle_checkpoint import fail_on_damage, flip, holds, save_small, tree

from gptlab.config.errors import UserError
from gptlab.runtime.files.cache import cached_folder
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.files.staged_folder import staged_folder
from gptlab.training.checkpoint.format import CheckpointError
from gptlab.training.checkpoint.load import load_newest, verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.retention import retain
from gptlab.training.checkpoint.write import save_checkpoint

posix_only = pytest.mark.skipif(os.name != "posix", reason="needs fork, signals or limits of POSIX")


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    path = save_small(tmp_path, 10, seed=1)
    assert save_small(tmp_path, 10, seed=2) == path
    assert holds(path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
    flip(path / "model.safetensors")
    save_small(tmp_path, 10, seed=3)
    assert holds(path, 3)


def test_a_save_clears_what_killed_saves_left(tmp_path: Path) -> None:
    save_small(tmp_path, 10)
    left = tmp_path / ".step-00000020.tmp-4711"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".step-00000005.removed-4711").mkdir()
    kept = tmp_path / ".mine"
    kept.mkdir()
    save_small(tmp_path, 30)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".mine", "step-00000010", "step-00000030"]


def test_one_moved_aside_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    """What a kill between the two renames of a second save of step 10 leaves."""
    aside = save_small(tmp_path, 10).rename(tmp_path / ".step-00000010.replaced-0")
    assert load_newest(tmp_path, fail_on_damage).path == aside
    assert list_checkpoints(tmp_path) == [aside]
    save_small(tmp_path, 20)
    assert [entry.name for entry in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000020"]
    assert holds(tmp_path / "step-00000010", 10)


def test_one_moved_aside_serves_when_its_successor_is_damaged(tmp_path: Path) -> None:
    aside = tmp_path / ".step-00000010.replaced-0"
    shutil.copytree(save_small(tmp_path, 10), aside)
    flip(tmp_path / "step-00000010" / "model.safetensors")
    lines: list[str] = []
    assert load_newest(tmp_path, lines.append).path == aside
    assert len(lines) == 1
    save_small(tmp_path, 10, seed=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
    assert holds(tmp_path / "step-00000010", 2)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "make the folder writable"),
        (errno.EROFS, "make the folder writable"),
        (errno.EIO, "fix the cause"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_refusing_file_system_leaves_the_older_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, call: str, again: bool
) -> None:
    """The first call of a save is refused, in the next save the second, and so on."""
    step = 10 if again else 20
    real = getattr(os, call)
    # mkdir: only of the temporary folder (the parent exists); rename: of the former one, of the new one, and to remove
    # the former; fsync: of four files, the temporary folder, the parent.
    for refused in range({"fsync": 6, "rename": 2 if again else 1, "mkdir": 1}[call]):
        shutil.rmtree(tmp_path)
        save_small(tmp_path, 10)
        before = tree(tmp_path)
        calls = 0

        def refuse(*arguments: Any, refused: int = refused, **keywords: Any) -> Any:
            nonlocal calls
            calls += not (call == "mkdir" and Path(arguments[0]) == tmp_path)
            if calls == refused + 1:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(CheckpointError) as caught:
                save_small(tmp_path, step, seed=77)
        line = str(caught.value)
        assert "\n" not in line
        assert str(tmp_path) in line
        assert os.strerror(number) in line
        assert "bytes needed" in line
        assert remedy in line
        if call == "fsync" and refused == 5:
            # The last flush is that of the parent: the new one has its name already, and the former still stands.
            assert holds(load_newest(tmp_path, fail_on_damage).path, 77)
            assert sum(holds(path, 10) for path in tmp_path.iterdir()) == 1
        else:
            assert tree(tmp_path) == before
        save_small(tmp_path, step, seed=78)
        assert holds(load_newest(tmp_path, fail_on_damage).path, 78)


@posix_only
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_that_cannot_be_flushed_are_passed_over_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some network file systems know no flush of a folder, and say so with EINVAL. Any other refusal is an error."""
    real, refused = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal refused
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused += 1
            raise OSError(number, os.strerror(number))
        real(descriptor)

    def build(folder: Path) -> dict[str, Any]:
        (folder / "tokens").write_bytes(b"1")
        return {}

    monkeypatch.setattr(os, "fsync", fsync)
    works: list[Callable[[], object]] = [
        lambda: save_small(tmp_path / "checkpoints", 10),
        lambda: write_json_atomic(tmp_path / "run.json", {}),
        lambda: cached_folder(tmp_path / "tokens", build, what="tokens"),
        lambda: fill(tmp_path / "export"),
    ]
    for count, work in enumerate(works, start=1):
        with pytest.raises(UserError) if number == errno.EIO else contextlib.nullcontext():
            work()
        assert refused >= count
    if number != errno.EIO:
        assert holds(tmp_path / "checkpoints/step-00000010", 10)
        assert (tmp_path / "tokens/tokens").exists()


def fill(target: Path) -> None:
    with staged_folder(target):
        pass


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path, 10)
    before = tree(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"No space left.*[0-9]+ bytes needed, 100 free.*free some space"):
        save_small(tmp_path, 20)
    assert tree(tmp_path) == before


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_small(tmp_path, 10)
    assert tree(tmp_path) == {}


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot save"):
        save_small(tmp_path / "checkpoints", 10)


@posix_only
def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for step, size in ((10, 1_000), (20, 50_000)):
            try:
                save_checkpoint(tmp_path, step, model={"x": torch.zeros(size)}, optimizer={}, state={})
            except CheckpointError as error:
                print(error)

    done = run_forked(work)
    assert "File too large" in done.stdout
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
    verify_checkpoint(tmp_path / "step-00000010")


# --- kills ------------------------------------------------------------------------------------------------------------

OPERATIONS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open")


def save_with(after: Callable[[int], object], folder: Path, step: int) -> None:
    """Save and retain; `after` is called with the number of each operation, from 1, once it is done."""
    calls = itertools.count(1)

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            number = next(calls)
            try:
                return real(*arguments, **keywords)
            finally:
                after(number)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, noted(getattr(os, name)))
        save_small(folder, step, seed=77)
        retain(folder, keep_last=1, keep_every_steps=None, best_step=None)


def without_process(folder: Path) -> dict[str, bytes]:
    """`tree`, without the number of the process in the names of what is not finished."""
    return {re.sub(r"\.(tmp|removed)-\d+", r".\1", name): content for name, content in tree(folder).items()}


@posix_only
@pytest.mark.parametrize("resaved", [20, 30], ids=["same step", "new step"])
def test_a_kill_at_any_file_operation_leaves_the_former_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resaved: int
) -> None:
    """What is on the disk after every operation of a save and of the retention that follows it. Before the next one,
    the folder is the same but for bytes that were written meanwhile, and flushing these is an operation. A SIGKILL
    leaves the same, as every eighth shows; one at every operation of a run: tests/slow/test_failpoints.py."""
    template, saved, copied = tmp_path / "template", tmp_path / "saved", []
    for step in (10, 20):
        save_small(template, step)
    shutil.copytree(template, saved)
    real = {name: getattr(os, name) for name in OPERATIONS}

    def copy(number: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, function in real.items():
                patch.setattr(os, name, function)
            copied.append(shutil.copytree(saved, tmp_path / f"killed-{number:03d}"))

    save_with(copy, saved, resaved)
    # Two folders made, six flushes, a rename or two, and one or two checkpoints of four files removed.
    assert len(copied) > 15
    for number in range(8, len(copied) + 1, 8):
        killed = shutil.copytree(template, tmp_path / "killed")

        def kill(reached: int, last: int = number) -> None:
            if reached == last:
                os.kill(os.getpid(), signal.SIGKILL)

        assert run_forked(functools.partial(save_with, kill, killed, resaved)).returncode == -signal.SIGKILL
        assert without_process(killed) == without_process(copied[number - 1])
        shutil.rmtree(killed)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the saves below are checked for their names only
    found = []
    for folder in copied:
        newest = load_newest(folder, fail_on_damage).path
        new = holds(newest, 77)
        assert new or holds(newest, 20)
        found.append(new)
        # The next run goes on from there, and leaves no trace of the kill.
        save_small(folder, 40)
        assert all(entry.name.startswith("step-") for entry in folder.iterdir())
        for path in list_checkpoints(folder):
            verify_checkpoint(path)
    assert found == sorted(found), "once the new one is there, no later kill takes it away"
    assert set(found) == {False, True}
