"""Which run a folder and its checkpoints belong to, so that no run resumes from another run's checkpoint.

    config.json                        the configuration
    run.json                           "run_id", "config_sha256", and "config_changes": what gptlab itself changed later
    checkpoints/step-N/state.json      "run": the id, the configuration with its hash, and the data it was trained on

The id is random and stays with the folder, which may be copied, moved and renamed. Fields that decide what is computed
must have the values that the checkpoint was trained with; `FREE_FIELDS` may differ.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.runtime.files.strict_json import write_json_atomic
from gptlab.runtime.records.run_directory import RunDirectory

FREE_FIELDS = frozenset({
    # Places. What is there has fingerprints of its own.
    "run_dir", "init_from", "data.source", "data.val_source", "data.cache_dir", "tokenizer.path", "eval.core_dir",
    # How the work is done. A resume on another kind of machine says that it is not bit for bit.
    "parallel.mode", "runtime.device", "runtime.compile", "runtime.process_timeout_seconds",
    # What is kept, which a full disk may force a user to change.
    "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.keep_best", "checkpoint.background",
    "checkpoint.on_failure",
})  # fmt: skip
"""Fields of config.json that may differ from what a checkpoint was trained with."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What every checkpoint of a run says of the run."""

    id: str
    config: Mapping[str, Any]
    """The content of config.json."""
    data_fingerprint: str | None = None
    """None: unknown (an imported model)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "config_sha256": config_sha256(self.config),
            "config": dict(self.config),
            "data_fingerprint": self.data_fingerprint,
        }


def identity_of(run: RunDirectory, data_fingerprint: str) -> RunIdentity:
    """What the run's next checkpoints say of it."""
    run_id = recorded_id(run)
    assert run_id is not None
    return RunIdentity(run_id, run.read_config(), data_fingerprint)


def new_run_id() -> str:
    return uuid.uuid4().hex


def config_sha256(values: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a config.json; the same for any order of keys and any spacing."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def recorded_id(run: RunDirectory) -> str | None:
    """The id in run.json; None if that is lost, or written by an older gptlab."""
    value = run.recorded().get("run_id")
    return value if isinstance(value, str) else None


def saved_identity(state: Mapping[str, Any], checkpoint: Path) -> RunIdentity | None:
    """The run that a checkpoint's state.json names; None if an older gptlab wrote it. UserError if it is malformed."""
    if "run" not in state:
        return None
    match state["run"]:
        case {"id": str(run_id), "config_sha256": str(digest), "config": dict(config), "data_fingerprint": data} if (
            digest == config_sha256(config) and isinstance(data, str | None)
        ):
            return RunIdentity(run_id, config, data)
    raise UserError(f"cannot use {checkpoint}: what its state.json says of its run was not written by gptlab")


def require_own(run: RunDirectory, saved: RunIdentity | None, checkpoint: Path) -> None:
    """UserError if a checkpoint names another run than its folder's."""
    own = recorded_id(run)
    if saved is not None and own is not None and own != saved.id:
        raise UserError(
            f"{checkpoint} is a checkpoint of another run ({saved.id[:12]}; this one is {own[:12]}): move it out of "
            f"{checkpoint.parent}"
        )


def edited_field(run: RunDirectory, saved: RunIdentity) -> str | None:
    """The first field of config.json that differs from what a checkpoint was trained with, as `seed = 3, not 2`; None
    if none does, apart from `FREE_FIELDS` and what `change_config` has recorded."""
    config = run.read_config()
    if config_sha256(config) == config_sha256(saved.config):
        return None
    now, then = flatten(config), flatten(saved.config)
    recorded = _recorded_values(run)
    for name in (*then, *(name for name in now if name not in then)):
        values = (then.get(name), now.get(name))
        legitimate = name in FREE_FIELDS or all(value in recorded.get(name, ()) for value in values)
        if values[0] != values[1] and not legitimate:
            return f"{name} = {values[1]!r}, not {values[0]!r}"
    return None


def change_config(run: RunDirectory, values: Mapping[str, Any], *, step: int) -> None:
    """Make `values` the config.json of a run that has done `step` steps, and record in run.json which fields changed,
    so that earlier checkpoints still belong to it. run.json is written first: a recorded change that was not made does
    no harm."""
    record = run.read_provenance()
    now, then = flatten(values), flatten(run.read_config())
    fields = {name: [then.get(name), now.get(name)] for name in {**then, **now} if then.get(name) != now.get(name)}
    earlier = record.get("config_changes")
    change = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "fields": fields}
    changes = [*(earlier if isinstance(earlier, list) else []), change]
    changed = {**record, "config_sha256": config_sha256(values), "config_changes": changes}
    write_json_atomic(run.provenance_path, changed)
    write_json_atomic(run.config_path, dict(values))


def _recorded_values(run: RunDirectory) -> dict[str, list[Any]]:
    """{field: every value before or after a recorded change}."""
    values: dict[str, list[Any]] = {}
    changes = run.recorded().get("config_changes")
    for change in changes if isinstance(changes, list) else ():
        match change:
            case {"fields": dict(fields)}:
                for name, pair in fields.items():
                    values.setdefault(name, []).extend(pair if isinstance(pair, list) else ())
    return values
