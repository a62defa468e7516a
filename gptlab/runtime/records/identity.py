"""Which checkpoints are a run's own.

    config.json                        the configuration
    run.json                           "run_id", "config_sha256", and "config_changes": what gptlab itself changed later
    checkpoints/step-N/state.json      "run": the id, the configuration with its hash, and the data it was trained on

The id is random and stays with the folder, which may be copied, moved and renamed. Fields that decide what is computed
must have the values that a checkpoint was trained with; `FREE_FIELDS` may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptlab.config.errors import UserError
from gptlab.config.load import flatten
from gptlab.runtime.files.plain_file import json_sha256, write_json_atomic
from gptlab.runtime.records.run_directory import Identity, RunDirectory, identity, list_in, recorded_id, utc_now

FREE_FIELDS = frozenset({
    # Places. What is there has fingerprints of its own.
    "run_dir", "init_from", "data.source", "data.val_source", "data.cache_dir", "tokenizer.path", "eval.core_dir",
    # How the work is done. A resume on another kind of machine says that it is not bit for bit.
    "parallel.mode", "parallel.shard_ranks", "parallel.reduce_each_micro_batch", "runtime.device", "runtime.compile",
    "runtime.process_timeout_seconds", "log.to", "log.report",
    # When a run saves and what is kept, which a long run or a full disk may force a user to change.
    "checkpoint.every_steps", "checkpoint.every_seconds", "checkpoint.keep_last", "checkpoint.keep_every_steps",
    "checkpoint.keep_best", "checkpoint.background", "checkpoint.on_failure",
})  # fmt: skip
"""Fields of config.json that may differ from what a checkpoint was trained with."""

_LIMITS = frozenset({
    "faults.max_skipped_in_a_row", "faults.max_skipped", "faults.spike_factor", "faults.spike_window",
    "faults.max_rewinds", "runtime.max_loss",
})  # fmt: skip
_REWOUND_TO = frozenset({"checkpoint.every_steps", "checkpoint.every_seconds"})


def changeable_fields(spike_factor: object) -> frozenset[str]:
    """Fields that `--resume` may change from its checkpoint on, which run.json then records: the limits on faults, and
    with a `faults.spike_factor` when a run saves, since it decides where a rewind returns to."""
    return _LIMITS if spike_factor is None else _LIMITS | _REWOUND_TO


def saved_identity(state: Mapping[str, Any], checkpoint: Path) -> Identity | None:
    """The run that a checkpoint's state.json names; None if it names none. UserError if it is malformed."""
    if "run" not in state:
        return None
    match state["run"]:
        case {
            "id": str(run_id),
            "config_sha256": digest,
            "config": dict(config),
            "data_fingerprint": None | str() as data,
        }:
            found = identity(config, data, run_id=run_id)
            if found["config_sha256"] == digest:
                return found
    raise UserError(f"cannot use {checkpoint}: what its state.json says of its run was not written by gptlab")


def require_own(run: RunDirectory, saved: Identity | None, checkpoint: Path) -> None:
    """UserError if a checkpoint names another run than its folder's."""
    own = recorded_id(run)
    if saved is not None and own is not None and own != saved["id"]:
        raise UserError(
            f"{checkpoint} is a checkpoint of another run ({saved['id'][:12]}; this one is {own[:12]}): move it out of "
            f"{checkpoint.parent}"
        )


def edited_field(run: RunDirectory, saved: Identity) -> str | None:
    """The first field of config.json that differs from what a checkpoint was trained with, as `seed = 3, not 2`; None
    if none does, apart from `FREE_FIELDS` and what `change_config` has recorded."""
    now, then = flatten(run.read_config()), flatten(saved["config"])
    recorded, free = _recorded_values(run), FREE_FIELDS
    for values in (now, then):
        free -= changeable_fields(values.get("faults.spike_factor"))
    for name in (*then, *(name for name in now if name not in then)):
        pair = (then.get(name), now.get(name))
        legitimate = name in free or all(value in recorded.get(name, ()) for value in pair)
        if pair[0] != pair[1] and not legitimate:
            return f"{name} = {pair[1]!r}, not {pair[0]!r}"
    return None


def change_config(run: RunDirectory, values: Mapping[str, Any], *, step: int) -> None:
    """Make `values` the config.json of a run that has done `step` steps, and record in run.json which fields changed,
    so that earlier checkpoints still belong to it. run.json is written first: a recorded change that was not made does
    no harm."""
    record = run.read_provenance()
    now, then = flatten(values), flatten(run.read_config())
    fields = {name: [then.get(name), now.get(name)] for name in {**then, **now} if then.get(name) != now.get(name)}
    changes = [*list_in(record, "config_changes"), {"step": step, "time": utc_now(), "fields": fields}]
    changed = {**record, "config_sha256": json_sha256(values), "config_changes": changes}
    write_json_atomic(run.provenance_path, changed)
    write_json_atomic(run.config_path, dict(values))


def _recorded_values(run: RunDirectory) -> dict[str, list[Any]]:
    """{field: every value before or after a recorded change}."""
    values: dict[str, list[Any]] = {}
    for change in list_in(run.recorded(), "config_changes"):
        match change:
            case {"fields": dict(fields)}:
                for name, pair in fields.items():
                    values.setdefault(name, []).extend(pair if isinstance(pair, list) else ())
    return values
