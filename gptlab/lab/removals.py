"""What can be deleted of runs: whole folders, all checkpoints, or the old ones; and what killed judges left in the
temporary folder."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError, cannot
from gptlab.lab.run_list import ListedRun, bytes_below, listed, weight_folders
from gptlab.lab.run_record import read_validations
from gptlab.runtime.files.cache_contents import Item, paths_in_use, temporary_item
from gptlab.runtime.files.plain_file import open_plain, read_json_object
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.names import MANIFEST, list_checkpoints, step_of


@dataclass(frozen=True, slots=True)
class Removal:
    run: ListedRun
    whole: bool
    """The folder, not its checkpoints alone."""
    reason: str
    checkpoints: tuple[Path, ...] = ()
    """Only these of its checkpoints; empty: all, or the folder."""

    @property
    def bytes(self) -> int:
        if self.checkpoints:
            return sum(map(bytes_below, self.checkpoints))
        return self.run.disk_bytes if self.whole else self.run.checkpoint_bytes


def removals(
    runs: Sequence[ListedRun], *, keep_best: int | None = None, failed: bool = False, checkpoints: bool = False
) -> list[Removal]:
    """What can be deleted, by what was asked for.

    `keep_best`: runs that have finished, but the N with the lowest bits per byte on the same data with the same
    `eval.tokens`; with `checkpoints`, only their checkpoints (N: 1 where it is None). `failed`: runs that ended before
    their first checkpoint. What can be resumed from a checkpoint is kept, and so are imported models, folders with
    files that gptlab did not write, and what is in a lab.
    """
    runs = [run for run in runs if not _in_lab(run)]
    chosen: list[Removal] = []
    best: dict[tuple[str | None, Any], list[float]] = {}
    ranked = [run for run in runs if run.status == "finished" and run.val_bpb is not None and run.is_own]
    kept = 1 if keep_best is None else keep_best
    for run in sorted(ranked, key=lambda run: (math.isnan(run.val_bpb or 0), run.val_bpb, run.start)):
        better = best.setdefault((run.data_fingerprint, run.fields.get("eval.tokens")), [])
        if len(better) < kept:
            better.append(run.val_bpb or 0)
        elif (checkpoints or keep_best is not None) and (not checkpoints or run.checkpoint_bytes):
            kept_bpb = f"; the worst that stays has {better[-1]:.4f}" if better else ""
            chosen.append(Removal(run, not checkpoints, f"val_bpb {run.val_bpb:.4f}{kept_bpb}"))
    for run in runs:
        if failed and run.is_own and run.status in ("failed", "killed", "preempted") and not run.has_checkpoint:
            chosen.append(Removal(run, True, f"{run.status} before its first checkpoint"))
    return chosen


def old_checkpoints(runs: Iterable[ListedRun]) -> list[Removal]:
    """Of each finished run, the checkpoints that are neither its last nor its best (by loss and by bits per byte), nor
    those that its configuration keeps for good (`checkpoint.keep_every_steps`)."""
    found = []
    for run in runs:
        if not _in_lab(run) and (old := _old_checkpoints(run)):
            found.append(Removal(run, False, "neither its best nor its last", tuple(old)))
    return found


def _in_lab(run: ListedRun) -> bool:
    """Whether it is the judge's."""
    return any((folder / "lab.json").exists() for folder in run.path.resolve().parents)


def _old_checkpoints(run: ListedRun) -> list[Path]:
    """Empty also where it is unknown which is the best."""
    every = run.fields.get("checkpoint.keep_every_steps")
    saved = {step_of(path) or 0: path for path in list_checkpoints(run.path / "checkpoints") if path.is_dir()}
    if not (run.status == "finished" and run.is_own and saved):
        return []
    try:
        validations = [line for line in read_validations(run.path / "metrics.jsonl")[0] if line.get("step") in saved]
        kept = {max(saved)}
        for number in ("val_loss", "val_bpb"):
            values = [(float(line[number]), int(line["step"])) for line in validations]
            kept |= {step for _, step in sorted(pair for pair in values if math.isfinite(pair[0]))[:1]}
    except (UserError, KeyError, TypeError, ValueError):
        return []
    if type(every) is int and every > 0:
        kept |= {step for step in saved if step % every == 0}
    return [saved[step] for step in sorted(saved.keys() - kept)]


def judge_leftovers() -> list[Item]:
    """The folders that judges make in the temporary folder, and leave there when they are killed."""
    used = paths_in_use()
    found = sorted(Path(tempfile.gettempdir()).glob("gptlab-judge-*"))
    return [temporary_item("left by judges", path, used) for path in found if _is_own_folder(path)]


def _is_own_folder(path: Path) -> bool:
    with suppress(OSError, AttributeError):  # Windows has no user ids
        return path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
    return False


def remove(removal: Removal) -> None:
    """Delete it. UserError, before anything is deleted, where a process uses the run or it is not what was listed."""
    path = removal.run.path
    with RunDirectory(path).lock():
        now = listed(path, held=True)
        same = (now.is_own, now.status, now.start) == (True, removal.run.status, removal.run.start)
        if not same or (removal.whole and now.has_checkpoint != removal.run.has_checkpoint):
            raise UserError(f"{path} is no longer what was listed: nothing of it was deleted")
        with cannot(f"delete {path}"):
            if removal.checkpoints:
                _remove_old(now, removal.checkpoints)
                return
            if not removal.whole:
                for folder in weight_folders(path):
                    shutil.rmtree(folder)
                return
            # What makes the folder a run goes last, so that what is left of a killed process can be listed.
            last = ("run.json", "config.json")
            for name in (*sorted({*os.listdir(path)} - {*last, ".lock"}), *last):
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink(missing_ok=True)
            with suppress(PermissionError):  # Windows, where releasing the lock deletes the file
                (path / ".lock").unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def _remove_old(run: ListedRun, checkpoints: Collection[Path]) -> None:
    """UserError, before anything is deleted, where one of them is not old now, or the last one is damaged: an older one
    may be all that is left."""
    if not set(checkpoints) <= set(_old_checkpoints(run)):
        raise UserError(f"{run.path} is no longer what was listed: nothing of it was deleted")
    last = list_checkpoints(run.path / "checkpoints")[-1]
    if not _is_intact(last):
        raise UserError(f"{last} is damaged: all checkpoints of {run.path} were kept")
    for path in checkpoints:
        # By this name, what is left of it if this process is killed never counts.
        gone = path.with_name(f".step-{step_of(path):08d}.removed-0")
        path.rename(gone)
        shutil.rmtree(gone)


def _is_intact(checkpoint: Path) -> bool:
    """Whether each file has the bytes that the manifest says."""
    try:
        files = read_json_object(checkpoint / MANIFEST)["files"]
        if not isinstance(files, dict) or not files:
            return False
        for name, recorded in files.items():
            with open_plain(checkpoint / name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != recorded["sha256"]:
                    return False
    except (UserError, OSError, KeyError, TypeError):
        return False
    return True
