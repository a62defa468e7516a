"""What `gptlab clean` deletes, and all that it must keep."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import command
from written_runs import write_run

from gptlab.config.errors import UserError
from gptlab.lab.removals import old_checkpoints, remove
from gptlab.lab.run_list import list_runs
from gptlab.runtime.files.cache import cached_folder, locked
from gptlab.runtime.files.cache_contents import cache_items, delete_item, is_used, paths_in_use
from gptlab.runtime.records.metrics import MetricsLog
from gptlab.runtime.records.run_directory import RunDirectory

HOUR = 3600.0
KEYS = ["0" * 24, "1" * 24, "2" * 24]


def aged(path: Path, hours: float = 2.0) -> Path:
    """With everything in it last changed and read so long ago."""
    then = time.time() - hours * HOUR
    for one in [*path.rglob("*"), path] if path.is_dir() else [path]:
        os.utime(one, (then, then), follow_symlinks=False)
    return path


def prepared(root: Path, key: str = KEYS[0]) -> Path:
    """Tokens in the cache, of 1,000 bytes beside the manifest."""

    def build(folder: Path) -> dict[str, Any]:
        (folder / "tokens.bin").write_bytes(bytes(1000))
        return {}

    cached_folder(root / "tokens" / key, build, what="tokens")
    return aged(root / "tokens" / key)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not that of judges at work on this machine. Nor are the runs those of the folder where the tests were started:
    in a clone after `make train`, they have checkpoints."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def kept(root: Path, **asked: Any) -> dict[str, str | None]:
    """{path below the cache: why it stays}."""
    return {item.path.relative_to(root).as_posix(): item.kept for item in cache_items(root, **asked)}


class TestCache:
    def test_what_can_be_made_again_goes(self, root: Path) -> None:
        prepared(root)
        for name in ("compile/fxgraph", "training-rates", "products", "hub", "downloads"):
            (root / name).mkdir(parents=True)
        measured = [f"{folder}/{'a' * 16}.json" for folder in ("training-rates", "products")]
        for name in (*measured, "hub/record.json", "downloads/core.zip", "sample-history"):
            (root / name).write_text("x")
        aged(root)
        by_network = "needs the network (--downloads)"
        rest = {"compile": None, "training-rates": None, "products": None, "hub": "not made again by itself",
                "sample-history": "not made again by itself"}  # fmt: skip
        found = {f"tokens/{KEYS[0]}": None, "downloads/core.zip": by_network, **rest}
        assert kept(root) == found
        assert kept(root, downloads=True) == found | {"downloads/core.zip": None}
        sizes = {item.path.name: item.bytes for item in cache_items(root)}
        manifest = (root / "tokens" / KEYS[0] / "manifest.json").stat().st_size
        assert (sizes[KEYS[0]], sizes["sample-history"]) == (1000 + manifest, 1)

    def test_what_is_used_stays(self, root: Path) -> None:
        for key in KEYS:
            prepared(root, key)
        with (root / "tokens" / KEYS[0] / "tokens.bin").open("rb"), locked(root / "tokens" / KEYS[1], "tokens", None):
            assert [*kept(root, fingerprints=[KEYS[2]]).values()] == ["in use", "being made", "a run trains on it"]
        assert [*kept(root).values()] == [None] * 3
        (root / "tokens" / KEYS[0] / "plans").mkdir()
        assert [*kept(root).values()] == ["changed within the last hour", None, None]
        os.utime(root / "tokens" / KEYS[1] / "tokens.bin", (time.time(), time.time() - 2 * HOUR))  # read now
        assert [*kept(root, unused_seconds=3 * HOUR).values()][1] == "used within 0.125 days"

    def test_what_began_to_be_used_after_it_was_listed_stays(self, root: Path) -> None:
        (item,) = [prepared(root)] and cache_items(root)
        with (item.path / "tokens.bin").open("rb"), pytest.raises(UserError, match="in use"):
            delete_item(item, paths_in_use())
        with locked(item.path, "tokens", None), pytest.raises(UserError, match="being made"):
            delete_item(item, set())
        assert (item.path / "tokens.bin").exists()
        delete_item(item, set())
        assert not item.path.exists()

    def test_a_path_is_used_by_what_is_in_it_and_by_command_lines(self, tmp_path: Path) -> None:
        assert is_used(tmp_path, [f"{tmp_path}/a"])
        assert is_used(tmp_path, [f'guard\0{{"temporary": "{tmp_path}"}}\0'])
        assert not is_used(tmp_path, [f"{tmp_path}-2/a"])

    def test_links_and_what_others_wrote_stay(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").touch()
        inner = prepared(root) / "link"
        inner.symlink_to(tmp_path / "mine")
        (root / "tokens" / KEYS[1]).symlink_to(tmp_path / "mine")
        (root / "tokens" / "notes").mkdir()
        (root / "tokenizers").symlink_to(tmp_path / "mine")
        (root / "compile" / "mine").mkdir(parents=True)
        (root / "core").mkdir()
        aged(root)
        assert {path for path, why in kept(root, downloads=True).items() if why is None} == {f"tokens/{KEYS[0]}"}
        assert command(["clean", "--cache-dir", root, "--yes", "--downloads"])[0] == 0
        assert (tmp_path / "mine" / "thesis.tex").exists()
        assert not inner.parent.exists()

    def test_what_killed_processes_left_goes(self, root: Path, own_temporary_folder: Path) -> None:
        (root / "tokens" / f".{KEYS[0]}.tmp").mkdir(parents=True)
        left = own_temporary_folder / "gptlab-judge-abc"
        for name in ("abc", "run-def", "young"):
            (own_temporary_folder / f"gptlab-judge-{name}").mkdir()
        (own_temporary_folder / "gptlab-other").mkdir()
        (own_temporary_folder / "gptlab-judge-link").symlink_to(own_temporary_folder / "gptlab-other")
        aged(own_temporary_folder)
        aged(root)
        os.utime(own_temporary_folder / "gptlab-judge-young")
        weights = left.with_name("gptlab-judge-run-def") / "model.safetensors"
        weights.touch()
        aged(weights.parent)
        with weights.open("rb"):
            assert command(["clean", "--cache-dir", root, "--yes"])[:2] == (0, TABLE.format(root=root))
        names = {"gptlab-judge-run-def", "gptlab-judge-young", "gptlab-other", "gptlab-judge-link"}
        assert {path.name for path in own_temporary_folder.iterdir()} == names
        assert not [*(root / "tokens").iterdir()]


TABLE = """\
cache: {root}
                 disk  goes  why the rest stays
prepared tokens  0 kB  0 kB
left by judges   0 kB  0 kB  in use, changed within the last hour
deleted 0 kB
"""


def run_with_checkpoints(folder: Path, losses: list[float], **fields: Any) -> Path:
    """A run that saved after each validation but the first, with intact checkpoints; bits per byte rise with the step,
    so that the first saved one is the best by them."""
    path = write_run(folder, [9.0], **fields)
    with MetricsLog(path / "metrics.jsonl") as log:
        for number, loss in enumerate(losses, start=1):
            step = 10 * number
            log.write("eval", step=step, val_loss=loss, val_bpb=step / 10, train_seconds=step, tokens=step)
            save(path, step)
    return path


def save(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes([step]) * 1000)
    digest = hashlib.sha256(bytes([step]) * 1000).hexdigest()
    files = {"model.safetensors": {"bytes": 1000, "sha256": digest}}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    return checkpoint


def old_steps(*folders: Path) -> list[int]:
    removed = [path for one in old_checkpoints(list_runs(folders)) for path in one.checkpoints]
    return [int(path.name.removeprefix("step-")) for path in removed]


class TestOldCheckpoints:
    def test_the_best_the_last_and_those_of_the_configuration_stay(self, tmp_path: Path) -> None:
        losses = [9.0, 5.0, 3.0, 4.0, 6.0]  # step 10 is the best by bits per byte, 30 by loss, 50 is the last
        assert old_steps(run_with_checkpoints(tmp_path / "a", losses)) == [20, 40]
        every = run_with_checkpoints(tmp_path / "b", losses, checkpoint__keep_every_steps=20)
        assert old_steps(every) == []
        assert old_steps(run_with_checkpoints(tmp_path / "c", [*losses, float("nan")])) == [20, 40, 50]

    def test_those_of_other_runs_stay(self, tmp_path: Path) -> None:
        losses = [9.0, 5.0, 3.0, 4.0, 6.0]
        for status in ("running", "preempted", "failed"):
            run_with_checkpoints(tmp_path / status, losses, status=status)
        damaged = run_with_checkpoints(tmp_path / "damaged", losses)
        (damaged / "metrics.jsonl").write_text('{"kind": "eval"\n')
        (run_with_checkpoints(tmp_path / "annotated", losses) / "notes.md").touch()
        (tmp_path / "labs" / "night").mkdir(parents=True)
        (tmp_path / "labs" / "night" / "lab.json").touch()
        run_with_checkpoints(tmp_path / "labs" / "night" / "run", losses)
        assert old_steps(tmp_path) == []

    def test_what_only_looks_like_a_checkpoint_stays(self, tmp_path: Path) -> None:
        path = run_with_checkpoints(tmp_path / "run", [9.0, 5.0, 3.0, 4.0, 6.0])
        for name in ("step-00000020-copy", "step-60"):
            (path / "checkpoints" / name).mkdir()
        (path / "checkpoints" / "step-00000008").touch()
        (removal,) = old_checkpoints(list_runs([path]))
        assert removal.bytes > 2000
        remove(removal)
        left = [
            "step-00000008", "step-00000010", "step-00000020-copy", "step-00000030", "step-00000050", "step-60",
        ]  # fmt: skip
        assert sorted(one.name for one in (path / "checkpoints").iterdir()) == left

    def test_nothing_goes_where_the_last_is_damaged_or_the_run_changed(self, tmp_path: Path) -> None:
        path = run_with_checkpoints(tmp_path / "run", [9.0, 5.0, 3.0, 4.0, 6.0])
        (removal,) = old_checkpoints(list_runs([path]))
        saved = sorted((path / "checkpoints").iterdir())
        with RunDirectory(path).lock(), pytest.raises(UserError, match="in use"):
            remove(removal)
        (saved[-1] / "model.safetensors").write_bytes(bytes(1000))
        with pytest.raises(UserError, match="is damaged: all checkpoints"):
            remove(removal)
        with MetricsLog(path / "metrics.jsonl") as log:
            log.write("eval", step=40, val_loss=1.0, val_bpb=0.1, train_seconds=9.0, tokens=9)
        save(path, 60)
        with pytest.raises(UserError, match="no longer what was listed"):
            remove(removal)
        assert sorted((path / "checkpoints").iterdir())[:-1] == saved


class TestCommand:
    def test_it_shows_asks_and_deletes(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        prepared(root)
        path = run_with_checkpoints(tmp_path / "runs" / "a", [9.0, 5.0, 3.0, 4.0, 6.0])
        words = ["clean", "--cache-dir", root]
        code, out, err = command(words)
        assert (code, err.count("there is no terminal to ask")) == (2, 1)
        assert "runs/a: checkpoints of steps 20, 40 (2 kB)" in out
        assert max(map(len, out.splitlines())) <= max(80, len(f"cache: {root}"))
        shown = json.loads(command([*words, "--json"])[1])
        assert (shown["deleted"], shown["freed_bytes"]) == (False, 0)
        assert {Path(item["path"]).name for item in shown["items"] if item["goes"]} == {
            KEYS[0],
            "step-00000020",
            "step-00000040",
        }
        without = json.loads(command([*words, "--json", "--no-checkpoints"])[1])
        assert [item["kind"] for item in without["items"] if item["goes"]] == ["prepared tokens"]
        assert (root / "tokens" / KEYS[0]).exists()
        done = json.loads(command([*words, "--json", "--yes"])[1])
        assert done["deleted"]
        assert done["freed_bytes"] == sum(item["disk_bytes"] for item in done["items"] if item["goes"])
        assert [one.name for one in sorted((path / "checkpoints").iterdir())] == [
            "step-00000010",
            "step-00000030",
            "step-00000050",
        ]
        assert not (root / "tokens" / KEYS[0]).exists()
        assert command(words)[::2] == (0, "")

    def test_an_empty_cache(self, root: Path) -> None:
        assert command(["clean", "--cache-dir", root]) == (0, f"cache: {root}\nnothing to delete\n", "")
        assert command(["clean", "--cache-dir", root, root / "none"])[0] == 2
