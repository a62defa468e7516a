"""Variants of a run, each with several seeds, trained one after the other in a folder that can be resumed.

    FOLDER/sweep.json      what was asked for, and the exit codes of runs that failed
    FOLDER/NAME-seed-N/    an ordinary run folder; its output is in FOLDER/NAME-seed-N.log

The first run is trained by its recipe, which may size it by timing this machine. The others repeat the first one's
configuration with fields changed (`--from`), so that all have the same size, batch and dtype.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from gptlab.config.errors import EXIT_PREEMPTED, EXIT_TRAINING_FAILED, EXIT_USAGE, UserError, cannot, one_line
from gptlab.config.fields import flag_of
from gptlab.lab.launch import Stop, launch
from gptlab.lab.run_record import RunRecord, read_run
from gptlab.runtime.files.plain_file import open_plain, read_json_object, sweep_temporaries, write_json_atomic
from gptlab.runtime.records.run_directory import RunDirectory

Values = Mapping[str, Any]
"""{argument of `gptlab train`: value}."""
Kind = Literal["sweep", "ladder"]
Status = Literal["finished", "failed", "stopped", "waiting"]

# A signal ended the process (128 + N), or the run after saving it: the run has not failed.
_STOPPED = (EXIT_PREEMPTED, 128 + 1, 128 + 2, 128 + 9, 128 + getattr(signal, "SIGUSR1", 10), 128 + 15)

_FILE, _LOCK = "sweep.json", ".lock"
_FORMAT = 1
_PLAIN_WORD = re.compile(r"(?!(?:true|false|none|on|off|auto)$)[A-Za-z].*", re.IGNORECASE)
_MAX_NAME_CHARACTERS = 100
_NO_REPORT = "--log.report=false"
"""`gptlab report` draws all runs of a sweep on one page; --log.report true, given to the sweep, overrides this."""
_LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SweepRun:
    path: Path
    variant: str
    seed: int
    changes: Values
    """In which it differs from the others: the varied fields and the seed."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.name}.log")

    @property
    def started(self) -> bool:
        return RunDirectory(self.path).config_path.is_file()

    @property
    def finished(self) -> bool:
        return self.started and RunDirectory(self.path).recorded().get("status") == "finished"


@dataclass(frozen=True)
class Sweep:
    folder: Path
    kind: Kind
    base: Values
    """What all runs have in common: `recipe` or `from`, and what was given beside it."""
    vary: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]

    @property
    def file(self) -> Path:
        return self.folder / _FILE

    @cached_property
    def runs(self) -> list[SweepRun]:
        """In the order of training: seed by seed over all variants, each time beginning with the next variant, so that
        what else loads the machine meets all variants alike."""
        variants = [*variants_of(self.vary).items()]
        return [
            SweepRun(self.folder / f"{name}-seed-{seed}", name, seed, {**changes, "seed": seed})
            for turn, seed in enumerate(self.seeds)
            for name, changes in variants[turn % len(variants) :] + variants[: turn % len(variants)]
        ]

    @property
    def first_started(self) -> SweepRun | None:
        """The run whose configuration the others repeat; None before there is one."""
        return next((run for run in self.runs if run.started), None)

    def arguments(self, run: SweepRun, repeated: SweepRun | None) -> list[str]:
        """What `gptlab train` is called with; `repeated`: the run whose configuration it repeats."""
        if repeated is None or "from" in self.base:
            return words_of({**self.base, **run.changes})
        # Given again: at another depth, a repeated run keeps only the fields in which it differs from its recipe.
        given = {name: value for name, value in self.base.items() if name != "recipe"}
        return words_of({"from": str(repeated.path), **given, **run.changes})

    def failures(self) -> dict[str, int]:
        """{run that failed for a reason of its own: exit code}, as sweep.json has it; empty before there is one. A run
        whose training failed left a folder: without it, there is no result, and the run is to be trained."""
        if not self.file.exists():
            return {}
        codes = _table(read_json_object(self.file), "failed")
        runs = [run for run in self.runs if type(codes.get(run.name)) is int]
        return {run.name: codes[run.name] for run in runs if run.started or codes[run.name] != EXIT_TRAINING_FAILED}

    def statuses(self) -> dict[str, Status]:
        """{run: status}, in the order of training."""
        failed = self.failures()

        def status(run: SweepRun) -> Status:
            if run.finished:
                return "finished"
            return "failed" if run.name in failed else "stopped" if run.started else "waiting"

        return {run.name: status(run) for run in self.runs}


def variants_of(vary: Mapping[str, Sequence[Any]]) -> dict[str, Values]:
    """{name: its fields} of every combination of values. A word is a name by itself (relu2); any other value follows
    the last part of its field, or all of it where two fields end alike (n_layer-4)."""
    ends = Counter(field.rpartition(".")[2] for field in vary)
    found: dict[str, Values] = {}
    for values in itertools.product(*vary.values()):
        parts = []
        for field, value in zip(vary, values, strict=True):
            text, end = _text(value), field.rpartition(".")[2]
            parts.append(text if _PLAIN_WORD.fullmatch(text) else f"{end if ends[end] == 1 else field}-{text}")
        name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")[:_MAX_NAME_CHARACTERS] or "base"
        taken = {other.lower() for other in found}  # some file systems do not tell A from a
        numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        found[next(one for one in numbered if one.lower() not in taken)] = dict(zip(vary, values, strict=True))
    return found


def words_of(values: Values) -> list[str]:
    """The command line of these arguments. A value follows its flag after `=`, so that it may begin with a dash."""
    words = [values["recipe"]] if "recipe" in values else []
    for name, value in values.items():
        if isinstance(value, list | tuple):
            words += [f"{flag_of(name)}={_text(item)}" for item in value] or [flag_of(name)]
        elif name != "recipe":
            words.append(f"{flag_of(name)}={_text(value)}")
    return words


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder. UserError where there is none, or sweep.json is damaged."""
    if not (folder / _FILE).is_file():
        raise UserError(f"{folder} holds no sweep: it has no {_FILE}")
    match read_json_object(folder / _FILE):
        case {"format": 1, "kind": "sweep" | "ladder" as kind, "base": dict(base), "vary": dict(vary),
              "seeds": list(seeds)}:  # fmt: skip
            lists = all(isinstance(values, list) and values for values in vary.values())
            if lists and seeds and all(isinstance(seed, int) and seed >= 0 for seed in seeds):
                return Sweep(folder, kind, base, vary, seeds)
    raise UserError(f"{folder / _FILE} is damaged, or was written by another version of gptlab")


def begin_sweep(sweep: Sweep) -> None:
    """Write sweep.json, or find that it asks for the same. UserError, by the field that differs, where it does not."""
    with cannot(f"make the folder {sweep.folder}"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
    asked = json.loads(json.dumps({"format": _FORMAT, **asdict(sweep), "failed": {}}, default=str))
    del asked["folder"]
    if not sweep.file.exists():
        sweep_temporaries(sweep.folder)
        if other := next((path.name for path in sweep.folder.iterdir() if path.name != _LOCK), None):
            raise UserError(f"{sweep.folder} holds no sweep but {other}: choose another --name")
        write_json_atomic(sweep.file, asked)
        return
    there, now = (_definition(values) for values in (read_json_object(sweep.file), asked))
    for name in {**there, **now}:
        if there.get(name) != now.get(name):
            raise UserError(
                f"{sweep.folder} holds another {sweep.kind}, with {name} = {json.dumps(there.get(name))}, not "
                f"{json.dumps(now.get(name))}: choose another --name, or continue that one with --resume "
                f"{shlex.quote(str(sweep.folder))}"
            )


def _definition(values: Values) -> dict[str, Any]:
    """{field: value} of what sweep.json asks for."""
    varied = {f"vary {name}": value for name, value in _table(values, "vary").items()}
    return {key: values.get(key) for key in ("kind", "seeds")} | varied | _table(values, "base")


def _table(values: Values, key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


@contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """UserError where another process trains this sweep."""
    lock = FileLock(sweep.folder / _LOCK, thread_local=False)
    with cannot(f"lock {sweep.folder}"):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            problem = "is being trained by another process: wait until it ends, or stop it"
            raise UserError(f"{sweep.folder} {problem}") from None
    try:
        yield
    finally:
        lock.release()


def train_sweep(sweep: Sweep, stop: Stop, *, retry_failed: bool = False) -> Iterator[tuple[SweepRun, int | None]]:
    """Train what has not finished, and yield each run twice: with None before it is trained, and then with its exit
    code. Ends early where a signal asks for it.

    A run that failed is trained again only with `retry_failed`, but one that was refused (EXIT_USAGE) always is: what
    refused it, such as a missing file, may have changed. UserError where the first run cannot start, since all others
    repeat it.
    """
    failures = {} if retry_failed else sweep.failures()
    failed = {name for name, code in failures.items() if code != EXIT_USAGE}
    for run in sweep.runs:
        if run.name in failed or run.finished:
            continue
        if stop.requested:
            return
        yield run, None
        repeated = sweep.first_started
        code = launch(run.path, [_NO_REPORT, *sweep.arguments(run, repeated)], log=run.log, stop=stop)
        if code == EXIT_USAGE and repeated is None and not run.started:
            raise UserError(f"{run.name} cannot start: {why_failed(run)}")
        _record(sweep, run, None if code == 0 or code in _STOPPED or stop.requested else code)
        yield run, code


def _record(sweep: Sweep, run: SweepRun, failed: int | None) -> None:
    values, failures = read_json_object(sweep.file), sweep.failures()
    now = {name: code for name, code in failures.items() if name != run.name}
    if failed is not None:
        now[run.name] = failed
    if values.get("failed") != now:
        write_json_atomic(sweep.file, values | {"failed": now})


def why_failed(run: SweepRun) -> str:
    """The reason in run.json, else the last line that says `error` in the log, else the last one."""
    failure = RunDirectory(run.path).recorded().get("failure")
    if isinstance(failure, dict) and failure.get("reason"):
        return one_line(UserError(str(failure["reason"])))
    with cannot(f"read {run.log}"), open_plain(run.log) as file:
        file.seek(max(0, file.seek(0, 2) - _LOG_TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("gptlab: error: ")] or lines or ["it printed nothing"]
    return one_line(UserError(said[-1].removeprefix("gptlab: error: ")))


def sides_of(sweep: Sweep) -> dict[str, list[RunRecord]]:
    """{variant: its runs that count}: those that have finished, and those whose training failed, after a validation or
    by its loss."""
    failed = {name for name, code in sweep.failures().items() if code == EXIT_TRAINING_FAILED}
    sides: dict[str, list[RunRecord]] = {}
    for name in variants_of(sweep.vary):
        runs = [run for run in sweep.runs if run.variant == name and (run.finished or run.name in failed)]
        records = map(read_run, (run.path for run in runs))
        if counted := [record for record in records if record.has_result]:
            sides[name] = counted
    return sides
