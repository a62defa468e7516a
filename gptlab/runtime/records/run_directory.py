"""The folder of a run: what is in it, which process may write to it, and the status of the run."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError, cannot
from gptlab.runtime.files.plain_file import json_sha256, read_json_object, sweep_temporaries, write_json_atomic

Status = Literal["running", "finished", "preempted", "failed"]

_CREATED = ("tokenizer", "code", "environment.txt", "gpu.txt", "config.json", "run.json")
"""What `RunDirectory.create` writes."""
_OWNER, _LOCK = ".lock.json", ".lock"

_MARKS = {"run.json", "metrics.jsonl", "checkpoints"}


def is_run(names: Collection[str]) -> bool:
    """Whether a folder with these entries holds a run. A configuration alone is none: other programs write a
    config.json too, and a lab's baseline is one."""
    return "config.json" in names and not _MARKS.isdisjoint(names)


def require_outside_runs(file: Path, option: str) -> None:
    """UserError where the file that an option names would be one of a run."""
    for folder in file.resolve().parents:
        if (folder / "config.json").is_file() and is_run(os.listdir(folder)):
            raise UserError(f"{option} {file} is inside the run folder {folder}: name a file outside it")


class _Entry:
    """The path of a file or folder in a run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A folder that holds a run. config.json makes it one: it is written last."""

    path: Path
    run_id: str | None = field(default=None, compare=False)
    """That of run.json when the folder was made or opened; None where it is unknown."""

    config_path = _Entry("config.json")
    machine_path = _Entry("machine.json")
    """Of a configuration that is no run (`is_run`): what `sized_for` gives."""
    provenance_path = _Entry("run.json")
    metrics_path = _Entry("metrics.jsonl")
    log_path = _Entry("log.txt")
    tokenizer_path = _Entry("tokenizer")
    code_path = _Entry("code")
    environment_path = _Entry("environment.txt")
    checkpoints_path = _Entry("checkpoints")
    summary_path = _Entry("summary.json")

    @classmethod
    def create(
        cls, path: Path, config_json: Mapping[str, object], provenance: Mapping[str, object], *,
        contents: Callable[[RunDirectory], None] = lambda run: None,
    ) -> RunDirectory:  # fmt: skip
        """Start a run in `path`, a folder that does not exist yet or is empty; UserError otherwise.

        `contents` writes what else a run must have (its tokenizer, the code that it runs). If anything cannot be
        written, nothing is left.
        """
        run = cls(path, str(provenance.get("run_id") or uuid.uuid4().hex))
        run.require_free()  # before the lock, which would leave its file in somebody's folder
        is_new = not path.exists()
        with cannot(f"make the run folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
        try:
            with run.lock(), ExitStack() as undo:
                run.require_free()
                run._remove(*_CREATED)  # of a process that was killed here
                undo.callback(run._remove, *_CREATED, _OWNER, _LOCK)  # the lock last: until then the folder is not free
                named = {"run_id": run.run_id, "config_sha256": json_sha256(config_json)} | dict(provenance)
                write_json_atomic(run.provenance_path, named | {"status": "running", "end": None, "failure": None})
                contents(run)
                write_json_atomic(run.config_path, dict(config_json))
                undo.pop_all()
        except BaseException:
            if is_new:
                with suppress(OSError):
                    path.rmdir()
            raise
        return run

    def _remove(self, *names: str) -> None:
        for path in (self.path / name for name in names):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def require_free(self) -> None:
        """UserError unless a run can start here, in an empty folder or one that does not exist, and this user may write
        there. Writes nothing."""
        entries = sorted(self.path.iterdir()) if self.path.is_dir() else []
        if any(entry.name not in (_LOCK, _OWNER) or entry.is_symlink() for entry in entries):
            self._require_leftovers(entries)
        nearest = next((place for place in (self.path, *self.path.parents) if os.path.exists(place)), None)
        if nearest is not None and nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"cannot make the run folder {self.path}: Permission denied; name another --run-dir")

    def _require_leftovers(self, entries: list[Path]) -> None:
        """UserError unless all in the folder is what a process left that was killed in `create`."""
        if link := next((entry for entry in entries if entry.is_symlink()), None):
            raise UserError(f"{link} is a link, and a run folder holds no links: name another --run-dir")
        if self.config_path.exists():
            remedy = "continue it with gptlab train --resume"
            if "imported" in self.recorded():
                remedy = "train from its weights with gptlab train nanogpt/finetune --init-from"
            folder = shlex.quote(str(self.path))
            raise UserError(f"{self.path} already holds a run: name another folder, or {remedy} {folder}")
        ours = re.compile(rf"\..*\.tmp|{'|'.join(map(re.escape, (*_CREATED, _OWNER, _LOCK)))}")
        if other := next((entry.name for entry in entries if not ours.fullmatch(entry.name)), None):
            raise UserError(f"the run folder {self.path} is not empty (it holds {other}); name another --run-dir")

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run in `path`; UserError if there is none, or a link is anywhere in it: what a run writes, truncates and
        removes must be its own. The folder itself may be reached through one."""
        run = cls(path)
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}; name one that `gptlab train` made, such as runs/NAME")
        if not run.config_path.is_file():
            raise UserError(
                f"{path} is not a run folder: it has no config.json; name a folder that `gptlab train` made"
            )
        for folder, folders, files in os.walk(path):
            for inner in (Path(folder, name) for name in sorted((*folders, *files))):
                if inner.is_symlink():
                    raise UserError(
                        f"{inner} is a link, and a run folder holds no links: put what it leads to in its place"
                    )
        return cls(path, recorded_id(run))

    def require_in_place(self) -> None:
        """UserError unless the path still leads to the folder that was made or opened."""
        # Not by its inode, which some network file systems change.
        is_same = self.run_id is None or recorded_id(self) in (None, self.run_id)
        if not (is_same and os.path.isfile(self.config_path)):
            raise UserError(
                f"the run folder {self.path} was moved or removed while it trained: continue it where it is now, with "
                "gptlab train --resume FOLDER"
            )

    def read_config(self) -> dict[str, object]:
        """config.json; UserError if it is damaged, or that of a model of transformers, as `gptlab export` writes it."""
        values = read_json_object(self.config_path)
        if "model_type" in values:
            folder = shlex.quote(str(self.path))
            raise UserError(
                f"{self.path} holds a model of transformers, not a run: `gptlab import hf {folder} RUN` makes one"
            )
        return values

    def read_provenance(self) -> dict[str, object]:
        """run.json; UserError if it is missing or damaged."""
        return read_json_object(self.provenance_path)

    def recorded(self) -> dict[str, object]:
        """run.json; empty if it is lost or damaged, which must not end the run."""
        with suppress(UserError):
            return self.read_provenance()
        return {}

    def identity(self, data_fingerprint: str) -> Identity:
        """What the run's next checkpoints say of it."""
        return identity(self.read_config(), data_fingerprint, run_id=recorded_id(self))

    def sized_for(self) -> dict[str, object]:
        """The `device` and the `training_flops_per_second` that the recipe was given; empty where they are unknown."""
        return self.recorded() or (read_json_object(self.machine_path) if self.machine_path.is_file() else {})

    def has_finished(self) -> bool:
        """Whether it finished with the configuration that it has now: a resume may have changed that since, and been
        stopped before it trained."""
        match self.recorded():
            case {"status": "finished", "end": str(end), "config_changes": [*_, {"time": str(changed)}]}:
                return changed <= end
            case {"status": "finished"}:
                return True
        return False

    def set_status(self, status: Status, **extra: object) -> None:
        """Record in run.json the run's status, when it ended (null while it runs), and any `extra` facts.
        UserError where the folder is gone."""
        self.require_in_place()
        end = None if status == "running" else utc_now()
        facts = {**self.recorded(), "failure": None, **extra, "status": status, "end": end}
        write_json_atomic(self.provenance_path, facts)

    def set_failed(self, reason: str, *, step: int | None = None, loss: float | None = None) -> None:
        """Record that the run failed, why, in which step, and at which loss (nats/token), as far as known. The first of
        several reasons stays: it is the closest to the cause."""
        failure = self.recorded().get("failure") or {"reason": reason, "step": step, "loss": loss}
        self.set_status("failed", failure=failure)

    def replace_provenance(self, record: Mapping[str, object]) -> None:
        """Write run.json again after it was lost or damaged; a damaged one is kept next to it."""
        with suppress(OSError):
            self.provenance_path.replace(self.path / "run.json.damaged")
        write_json_atomic(self.provenance_path, dict(record))

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write {path inside the run: contents}; UserError if they cannot be written."""
        for name, content in files.items():
            path = self.path / name
            with cannot(f"write {path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process; UserError if another one holds the lock. A killed process holds none."""
        lock, owner = FileLock(self.path / _LOCK, thread_local=False), self.path / _OWNER
        with cannot(f"lock {self.path}"):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise UserError(self._in_use()) from None
        sweep_temporaries(self.path)
        try:
            with suppress(UserError):  # a full disk: the owner is only named in a message
                write_json_atomic(owner, {"pid": os.getpid(), "host": platform.node()})
            yield
        finally:
            with suppress(OSError):
                owner.unlink(missing_ok=True)
            lock.release()

    def in_use(self) -> bool:
        """Whether a process holds the lock, on this machine or, as far as `.lock.json` says, on another one."""
        lock = self.path / _LOCK
        if not lock.exists():
            return False
        with suppress(UserError):
            if read_json_object(self.path / _OWNER).get("host") != platform.node():
                return True
        try:
            with FileLock(lock, blocking=False):
                return False
        except Timeout:
            return True
        except OSError:  # a folder that this user may only read
            return False

    def _in_use(self) -> str:
        by = "another process"
        with suppress(UserError):
            owner = read_json_object(self.path / _OWNER)
            by += f" (pid {owner.get('pid')} on {owner.get('host')})"
        return f"{self.path} is in use by {by}; wait until it ends, stop it, or train in another folder with --run-dir"


Identity = dict[str, Any]
"""What a checkpoint says of its run: "id", "config" (the content of config.json) with "config_sha256", and
"data_fingerprint", which is None where it is unknown (an imported model)."""


def identity(config: Mapping[str, Any], data_fingerprint: str | None = None, *, run_id: str | None = None) -> Identity:
    """`run_id`: None for a new one."""
    digest = json_sha256(config)
    run_id = run_id or uuid.uuid4().hex
    return {"id": run_id, "config_sha256": digest, "config": dict(config), "data_fingerprint": data_fingerprint}


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_run_path(recipe: str, now: datetime) -> Path:
    """runs/RECIPE-YYYYMMDD-HHMMSS, with -2, -3, ... after runs of the same second.

    Characters of `recipe` that a folder name may not have ("gpt2/124M", a path) become hyphens.
    """
    name = re.sub(r"[^A-Za-z0-9._]+", "-", recipe).strip("-.") or "run"
    first = Path("runs", f"{name}-{now:%Y%m%d-%H%M%S}")
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def list_in(record: Mapping[str, object], name: str) -> list[Any]:
    """A list in a run.json, which may be damaged or untrusted; empty where there is none."""
    value = record.get(name)
    return value if isinstance(value, list) else []


def recorded_id(run: RunDirectory) -> str | None:
    """The id in run.json; None if that is lost, or has none."""
    value = run.recorded().get("run_id")
    return value if isinstance(value, str) else None
