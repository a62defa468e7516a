"""The folder of a run: what is in it, which process may write to it, and the status of the run."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from gptlab.config.errors import UserError
from gptlab.runtime.files.strict_json import read_json_object, sweep_temporaries, write_json_atomic

__all__ = ["RunDirectory", "Status", "default_run_path", "write_json_atomic"]

Status = Literal["running", "finished", "preempted", "failed"]

_LOCK_NAME = ".lock"
_OWNER_NAME = ".lock.json"


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

    config_path = _Entry("config.json")
    provenance_path = _Entry("run.json")
    metrics_path = _Entry("metrics.jsonl")
    log_path = _Entry("log.txt")
    tokenizer_path = _Entry("tokenizer")
    code_path = _Entry("code")
    environment_path = _Entry("environment.txt")
    gpu_path = _Entry("gpu.txt")
    checkpoints_path = _Entry("checkpoints")
    summary_path = _Entry("summary.json")

    @classmethod
    def create(
        cls,
        path: Path,
        config_json: Mapping[str, object],
        provenance: Mapping[str, object],
        *,
        contents: Callable[[RunDirectory], None] | None = None,
    ) -> RunDirectory:
        """Start a run in `path`, a folder that does not exist yet or is empty; UserError otherwise.

        `contents` writes what else a run must have (its tokenizer, the code that it runs). If anything cannot be
        written, nothing is left.
        """
        run = cls(Path(path))
        run.require_free()  # before the lock, which would leave its file in somebody's folder
        is_new = not run.path.exists()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {path}: {error.strerror or error}") from error
        try:
            with run.lock():
                run.require_free()
                run._fill(config_json, provenance, contents)
        except BaseException:
            if is_new:
                with suppress(OSError):
                    run.path.rmdir()
            raise
        return run

    def _fill(
        self,
        config_json: Mapping[str, object],
        provenance: Mapping[str, object],
        contents: Callable[[RunDirectory], None] | None,
    ) -> None:
        try:
            self._clear()
            write_json_atomic(self.provenance_path, {**provenance, "status": "running", "end": None, "failure": None})
            if contents is not None:
                contents(self)
            write_json_atomic(self.config_path, dict(config_json))
        except BaseException:
            self._clear()
            # Under the lock, its own file last: whoever opens it then finds a free folder.
            for path in (self.path / _OWNER_NAME, self.path / _LOCK_NAME):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise

    def _clear(self) -> None:
        """Remove what `create` writes, of this call or of a killed process."""
        for folder in (self.tokenizer_path, self.code_path):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.environment_path, self.gpu_path, self.config_path, self.provenance_path):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run in `path`; UserError if there is none."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise UserError(f"there is no run folder {path}; name one that `gptlab train` made, such as runs/NAME")
        if not run.config_path.is_file():
            raise UserError(f"{path} is no run: it has no config.json; name a folder that `gptlab train` made")
        run._require_no_links()
        return run

    def _require_no_links(self) -> None:
        """UserError for a link anywhere below the folder: what a run writes, cuts and removes must be its own. The
        folder itself may be reached through one."""
        for folder, folders, files in os.walk(self.path):
            for name in sorted((*folders, *files)):
                path = Path(folder, name)
                if path.is_symlink():
                    raise UserError(
                        f"{path} is a link, and a run folder holds no links: put what it leads to in its place"
                    )

    def read_config(self) -> dict[str, object]:
        """config.json; UserError if it is damaged."""
        return read_json_object(self.config_path)

    def read_provenance(self) -> dict[str, object]:
        """run.json; UserError if it is missing or damaged."""
        return read_json_object(self.provenance_path)

    def set_status(self, status: Status, **extra: object) -> None:
        """Record in run.json the run's status, when it ended (null while it runs), and any `extra` facts."""
        end = None if status == "running" else datetime.now(UTC).isoformat(timespec="seconds")
        facts = {**self.recorded(), "failure": None, **extra, "status": status, "end": end}
        write_json_atomic(self.provenance_path, facts)

    def set_failed(self, reason: str, *, step: int | None = None, loss: float | None = None) -> None:
        """Record that the run failed, why, in which step, and at which loss (nats/token), as far as known. The first of
        several reasons stays: it is the closest to the cause."""
        failure = self.recorded().get("failure") or {"reason": reason, "step": step, "loss": loss}
        self.set_status("failed", failure=failure)

    def recorded(self) -> dict[str, object]:
        """run.json; empty if it is lost or damaged, which must not end the run."""
        try:
            return self.read_provenance()
        except UserError:
            return {}

    def replace_provenance(self, record: Mapping[str, object]) -> None:
        """Write run.json again after it was lost or damaged; a damaged one is kept next to it."""
        with suppress(OSError):
            self.provenance_path.replace(self.path / "run.json.damaged")
        write_json_atomic(self.provenance_path, dict(record))

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write {path inside the run: contents}; UserError if they cannot be written."""
        for name, content in files.items():
            path = self.path / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process; UserError if another one holds the lock. A killed process holds none."""
        lock = FileLock(self.path / _LOCK_NAME, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise UserError(
                f"{self.path} is in use by another process{self._owner()}; wait until it ends, stop it, or train in "
                "another folder with --run-dir"
            ) from None
        except OSError as error:
            raise UserError(f"cannot lock {self.path}: {error.strerror or error}") from error
        owner = self.path / _OWNER_NAME
        sweep_temporaries(self.path)
        try:
            with suppress(UserError):  # a full disk: the owner is only named in a message
                write_json_atomic(owner, {"pid": os.getpid(), "host": platform.node()})
            yield
        finally:
            with suppress(OSError):
                owner.unlink(missing_ok=True)
            lock.release()

    def _owner(self) -> str:
        try:
            owner = read_json_object(self.path / _OWNER_NAME)
        except UserError:
            return ""
        return f" (pid {owner.get('pid')} on {owner.get('host')})"

    def require_free(self) -> None:
        """UserError unless a run can start here, in an empty folder or one that does not exist. Writes nothing."""
        if not self.path.is_dir():
            return
        if link := next((entry for entry in sorted(self.path.iterdir()) if entry.is_symlink()), None):
            raise UserError(f"{link} is a link, and a run folder holds no links: name another --run-dir")
        if self.config_path.exists():
            raise UserError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, or name another --run-dir"
            )
        # Without config.json, these are what a process killed inside `create` left.
        known = (self.provenance_path, self.tokenizer_path, self.code_path, self.environment_path, self.gpu_path)
        ours = {_LOCK_NAME, _OWNER_NAME, *(path.name for path in known)}
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ours)
        others = [name for name in others if not (name.startswith(".") and name.endswith(".tmp"))]
        if others:
            raise UserError(f"the run folder {self.path} is not empty (it holds {others[0]}); name another --run-dir")


def default_run_path(recipe: str, now: datetime, root: Path = Path("runs")) -> Path:
    """runs/RECIPE-YYYYMMDD-HHMMSS, with -2, -3, ... after runs of the same second.

    Characters of `recipe` that a folder name may not have ("gpt2/124M", a path) become hyphens.
    """
    name = re.sub(r"[^A-Za-z0-9._]+", "-", recipe).strip("-.") or "run"
    first = root / f"{name}-{now:%Y%m%d-%H%M%S}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path
