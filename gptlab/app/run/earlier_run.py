"""An earlier run: resumed by `--resume RUN`, or repeated by `--from RUN`.

Of a run that is resumed: its newest intact checkpoint, what must be unchanged, and what is written again. A finished
run may be given a longer length (`--resume RUN --steps MORE`), any run an earlier checkpoint (`--resume-from-step N`).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from gptlab.app.commands import longer_command
from gptlab.app.run.attempt import Attempt, Result
from gptlab.app.run.loaded_run import as_recorded, with_own_tokenizer
from gptlab.app.run.own_parts import OwnParts, own_parts_of
from gptlab.app.run.ranks import rank_0_reports
from gptlab.app.run.repeat import Facts, implementations_changed, repeated_config, stored_config, what_differs
from gptlab.app.run.run_request import RunRequest
from gptlab.app.run.session import Session
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json, flatten
from gptlab.config.run import RunConfig
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gptlab.lab.experiments.folder import has_stand_in
from gptlab.runtime.files.plain_file import json_sha256, read_json_object
from gptlab.runtime.hardware.device import resolve_device
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import change_config, changeable_fields, edited_field, require_own, saved_identity
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.provenance import RESUME_FACTS, Evidence
from gptlab.runtime.records.run_directory import RunDirectory, list_in, recorded_id
from gptlab.training.checkpoint.load import Checkpoint, load_to_train_on, select_checkpoint, verify_checkpoint
from gptlab.training.checkpoint.names import candidates, list_checkpoints, step_of
from gptlab.training.recorder import CLOSING_DECIMALS, Recorder, show_closing_block


@dataclass(slots=True)
class EarlierRun:
    """A run that is resumed, or repeated in a folder of its own."""

    run: RunDirectory
    stored: RunConfig | None = None
    """Of a run that is resumed: what config.json says, which has the length so far."""
    checkpoint: Checkpoint | None = None
    """Where a resumed run continues. None: it starts at step 0, since it ended before its first checkpoint."""
    goes_back: bool = False
    """Whether `checkpoint` was asked for by its step: `resume` sets those of later steps aside."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """{dotted field: value} that the request to repeat it changes."""

    def as_recorded(self, config: RunConfig) -> RunConfig:
        """`config` with what the run computed in and by, where it is "auto" and this processor like the run's."""
        return replace(config, runtime=as_recorded(self.run, config.runtime, resolve_device(config.runtime.device)))

    def compare(self, session: Session, facts: Facts, console: Console) -> None:
        """Warn of what differs today from what the run recorded. UserError for differences with which a run cannot be
        resumed."""
        if self.stored is not None:
            _require_same_start(self.run, self.checkpoint, session)
            if self.checkpoint is not None and self.stored.horizon != session.config.horizon:
                _require_longer(session, self.checkpoint)
        any_world_size, resumes = session.config.parallel.exact_any_world_size, self.stored is not None
        for line in what_differs(self.run, facts, self.asked, any_world_size=any_world_size, resumes=resumes):
            console.warn(line)

    def warn_of_implementations(self, found: Mapping[str, str], console: Console) -> None:
        """Warn where what computes the run is not what computed the checkpoint, or the run that is repeated."""
        if self.stored is None:
            before, of = self.run.recorded(), str(self.run.path)
        else:
            before, of = {} if self.checkpoint is None else self.checkpoint.state, "the checkpoint"
        if what := implementations_changed(before.get("implementations"), found):
            console.warn(f"not computed as {of} was ({what}): close to, not bit for bit")

    def resume(self, session: Session, attempt: Attempt, record: Recorder, facts: Facts, evidence: Evidence) -> None:
        """Put the state where the checkpoint left it. Then, and no earlier, record in the run folder that this process
        resumes the run, and put its files and clocks there too, or begin again where there is no checkpoint. UserError
        for the intact checkpoint (of untrusted origin) of a state that gptlab did not write."""
        checkpoint = self.checkpoint
        if checkpoint is not None:
            with checkpoint.reading_state():
                session.state.restore(checkpoint.model, checkpoint.optimizer, checkpoint.state)
                record.off_clock.add_earlier(checkpoint.state["off_clock"])
        if session.group.is_main:
            self._record(session, attempt, record, facts, evidence)
        if session.group.size > 1:
            attempt.share_run_folder()
            assert attempt.run is not None
            record.run = record.saves.run = attempt.run  # where a rank was given another folder
        if checkpoint is None:
            record.begin_again()
            return
        with checkpoint.reading_state():
            record.cut_to(checkpoint)
        if session.group.is_main:
            record.saves.catch_up(session.state, checkpoint.path)

    def _record(self, session: Session, attempt: Attempt, record: Recorder, facts: Facts, evidence: Evidence) -> None:
        """Record in the run folder, from here on the attempt's, that this process resumes the run, and write again what
        is lost. On rank 0."""
        assert self.stored is not None
        console, about = attempt.console, record.saves.about_run
        facts = {**facts, "implementations": about["implementations"]}
        _restore_tokenizer(self.run, session.data.tokenizer, console)
        if self.checkpoint is not None and self.goes_back:
            _set_later_checkpoints_aside(self.run, self.checkpoint.step, console)
        if self.checkpoint is not None and self.stored.horizon != session.config.horizon:
            _change_length(self.run, session, self.checkpoint, self.stored, console)
        attempt.run = self.run  # not before it has its new length, without which the same command would be refused
        _record_resume(self.run, facts, evidence, self.checkpoint, console)
        _change_fields(self.run, session.config, self.stored, self.checkpoint, console)
        about["run"] = self.run.identity(session.data.fingerprint)
        attempt.job.will_begin(self.run.path)  # not before the later checkpoints are aside


def open_repeated(request: RunRequest, attempt: Attempt) -> EarlierRun:
    """The run that `request` repeats; `attempt` then has its configuration."""
    assert request.from_run is not None
    run = RunDirectory.open(Path(request.from_run))
    _require_trained(run)
    _require_same_parts(attempt, run, "repeat")
    attempt.config = repeated_config(request, run)
    stored = flatten(asdict(stored_config(run)))
    return EarlierRun(run, asked={name: value for name, value in request.overrides.items() if value != stored[name]})


def open_resumed(request: RunRequest, attempt: Attempt) -> EarlierRun | Result:
    """The run that `request` resumes; `attempt` then has its configuration, and its folder under its lock. The Result
    of a run that is finished, whose closing block is shown again."""
    assert request.resume is not None
    run = RunDirectory.open(Path(request.resume))
    console, group, stored = attempt.console, attempt.group, stored_config(run)
    attempt.config = config = _requested(request, request.resumed(stored), run)
    if group.is_main:
        attempt.held.enter_context(run.lock())
    _require_trained(run)
    trains = config.horizon != stored.horizon or request.resume_from_step is not None
    if trains and stored.eval.only:
        raise UserError(f"{run.path} only validates: to train, gptlab train --from {run.path} --eval.no-only")
    finished = _finished_summary(config, run, console) if group.is_main and not trains else None
    if summary := group.broadcast("finished", finished):
        longer = longer_command(run.path, stored, own_parts_of(run.recorded()))
        # A lab keeps no optimizer's state, without which the command would be refused.
        console.line(f"{run.path} is finished" + f"; to train it on: {longer}" * (not has_stand_in(stored.data)))
        show_closing_block(summary, console)
        return Result(0, run.path, summary)
    _require_same_parts(attempt, run, "resume")
    checkpoint = _newest_checkpoint(run, console, group, request.resume_from_step)
    attempt.config = with_own_tokenizer(config, run)
    return EarlierRun(run, stored, checkpoint, goes_back=request.resume_from_step is not None)


def _require_trained(run: RunDirectory) -> None:
    """UserError for a run folder that an import wrote: it has no training to resume or repeat."""
    if "imported" in run.recorded():
        raise UserError(f"{run.path} was imported, not trained: to begin with its weights, --init-from {run.path}")


def _require_same_parts(attempt: Attempt, run: RunDirectory, verb: str) -> None:
    """UserError unless the attempt's parts are those that the run was trained with; a warning where their source has
    changed."""
    for warning in (attempt.parts or OwnParts()).require_those_of(run.path, run.recorded(), verb):
        attempt.console.warn(warning)


def _require_same_start(run: RunDirectory, checkpoint: Checkpoint | None, session: Session) -> None:
    """UserError unless the data is what run.json and the checkpoint name, and the first weights of a run with
    --init-from that starts again are the first ones."""
    record = run.recorded()
    if record and session.start is not None and record.get("init_from_fingerprint") != session.start.fingerprint:
        raise UserError(
            f"the weights of {session.config.init_from} are not those that {run.path} began with "
            f"(fingerprint {session.start.fingerprint[:12]}): bring them back, or train in a new folder"
        )
    known = [record["data_fingerprint"]] if "data_fingerprint" in record else []
    if checkpoint is not None and (saved := saved_identity(checkpoint.state, checkpoint.path)):
        known.append(saved["data_fingerprint"])
    for recorded in known:
        if recorded != session.data.fingerprint:
            raise UserError(
                f"the data is not what {run.path} was trained on (fingerprint {session.data.fingerprint}, was "
                f"{recorded}): bring the corpus back to resume"
            )


def _requested(request: RunRequest, stored: RunConfig, run: RunDirectory) -> RunConfig:
    """`stored`, for a finished run with the length that is requested. UserError where the request differs otherwise."""
    loss = request.overrides.get("horizon.until_val_loss")
    if loss is not None and not (stored.eval.every_steps or stored.eval.every_seconds):
        raise UserError(
            f"{run.path} does not validate on the way, so it cannot stop at a loss: train it again with --from "
            f"{run.path} --until-val-loss {loss:g} --eval.every-steps N"
        )
    is_finished = run.recorded().get("status") == "finished"
    wanted = request.with_length(stored) if is_finished else stored
    if different := request.disagreements(wanted):
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{request.resume} has another configuration: {different[0]}{more}; leave it out to resume (which "
            "fields may be given, such as checkpoint.every_steps and faults.max_rewinds, is in docs/contracts.md, "
            "Checkpoints; a finished run may be given another length, to train on)"
        )
    return wanted


def _finished_summary(config: RunConfig, run: RunDirectory, console: Console) -> dict[str, object]:
    """summary.json of a finished run whose final weights are intact; empty for any other."""
    if not run.has_finished():
        return {}
    try:
        load_tokenizer(run.tokenizer_path)
        summary = read_json_object(run.summary_path)
    except UserError:  # lost or damaged: resuming from the last checkpoint ends at once, and writes it again
        return {}
    if not _has_closing_numbers(summary):
        return {}
    if not config.eval.only:  # a run that only validates saves nothing
        try:
            verify_checkpoint(select_checkpoint(run.checkpoints_path, str(summary["num_steps"])))
        except UserError as error:
            console.warn(f"{run.path} is marked as finished, but its final weights are not intact: {error}")
            return {}
    return summary


def _has_closing_numbers(summary: Mapping[str, Any]) -> bool:
    """Whether each number of the closing block is there, and is one or None (unknown)."""
    found = [summary.get(key, "absent") for key in CLOSING_DECIMALS if key != "core_metric" or key in summary]
    # Integers of JSON may be longer than a float can be.
    return all(value is None or (type(value) in (int, float) and abs(value) < 2**63) for value in found)


def _set_later_checkpoints_aside(run: RunDirectory, step: int, console: Console) -> None:
    """Make the checkpoint of `step` the newest of the run. Those of later steps move to RUN/set-aside-1 (2, ...), with
    copies of the files that resuming will cut or replace.

    The copies come first, and the newest checkpoint moves first: a process killed in between leaves a run that resumes
    from the newest checkpoint that is still there.
    """
    folder = run.checkpoints_path
    later = [path for path in candidates(folder) if (step_of(path) or 0) > step]
    if not later:
        return
    aside = next(path for n in count(1) if not (path := run.path / f"set-aside-{n}").exists())
    try:
        (aside / folder.name).mkdir(parents=True)
        for path in (run.metrics_path, run.log_path, run.summary_path, run.provenance_path):
            if path.is_file():
                shutil.copyfile(path, aside / path.name)
        for path in reversed(later):
            os.rename(path, aside / folder.name / path.name)
    except OSError as error:
        raise UserError(f"cannot set the later checkpoints of {run.path} aside: {error.strerror or error}") from error
    steps = ", ".join(str(step_of(path)) for path in later)
    copies = ", ".join(sorted(path.name for path in aside.iterdir() if path.is_file()))
    console.warn(
        f"back to step {step}: the checkpoints of later steps ({steps}), and copies of {copies}, are in {aside}"
    )


def _newest_checkpoint(run: RunDirectory, console: Console, group: Group, step: int | None) -> Checkpoint | None:
    """The newest checkpoint that is intact for every rank, or that of `step`; None where the run ended before its first
    one. UserError where that of `step` is not there or not intact."""
    if step is not None and group.is_main:
        verify_checkpoint(select_checkpoint(run.checkpoints_path, str(step)))
    if group.broadcast("has checkpoints", bool(list_checkpoints(run.checkpoints_path))):
        with rank_0_reports(group, "an intact checkpoint"):
            checkpoint = load_to_train_on(run.checkpoints_path, console.warn, group, up_to=step)
            if step not in (None, checkpoint.step):
                raise UserError(f"no checkpoint of step {step} in {run.checkpoints_path} is intact for every process")
            _require_own_checkpoint(run, checkpoint, console)
            return checkpoint
    metrics = read_metrics(run.metrics_path) if group.is_main and run.metrics_path.exists() else []
    saved = [line.get("step") for line in metrics if line.get("kind") == "checkpoint"]
    if saved:
        raise UserError(
            f"no checkpoint in {run.checkpoints_path}, though one of step {saved[-1]} was saved there: bring it back, "
            "or train in a new folder"
        )
    console.line(f"{run.path} has no checkpoint yet: it starts again")
    return None


def _require_own_checkpoint(run: RunDirectory, checkpoint: Checkpoint, console: Console) -> None:
    """UserError where the checkpoint is another run's, or config.json was edited since."""
    saved = saved_identity(checkpoint.state, checkpoint.path)
    if saved is None:
        console.warn(f"{checkpoint.path} does not say which run it is of")
        return
    require_own(run, saved, checkpoint.path)
    if (edited := edited_field(run, saved)) is not None:
        raise UserError(
            f"{run.config_path} was edited after {checkpoint.path.name} was saved ({edited}): undo that to resume, or "
            f"train the changed configuration in a folder of its own with --from {run.path}"
        )


def _require_longer(session: Session, checkpoint: Checkpoint) -> None:
    """UserError where the run would be over before its first step."""
    horizon, step, seconds = session.config.horizon, checkpoint.step, checkpoint.state["train_seconds"]
    if session.finish.progress(step, seconds) >= 1.0:
        raise UserError(
            f"{horizon} is no more than the run has trained already ({step:,} steps, {seconds:.1f} s): to train it on, "
            "give the length of the whole run, including what it has trained"
        )
    loss = checkpoint.state["val_loss"]
    if horizon.until_val_loss is not None and loss is not None and loss <= horizon.until_val_loss:
        raise UserError(
            f"the run has reached the validation loss {horizon.until_val_loss:g} already ({loss:.4f}): to train it on, "
            "give a lower --until-val-loss, or none"
        )


def _change_length(
    run: RunDirectory, session: Session, checkpoint: Checkpoint, was: RunConfig, console: Console
) -> None:
    """Make the new length that of the run, and warn of what it changes."""
    now = config_to_json(session.config)
    change_config(run, run.read_config() | {name: now[name] for name in ("horizon", "schedule")}, step=checkpoint.step)
    done = session.finish.progress(checkpoint.step, checkpoint.state["train_seconds"])
    console.warn(
        f"training on from step {checkpoint.step} to {session.config.horizon} (was {was.horizon}): the schedule is a "
        f"new one, {done:.0%} of which is done, so the learning rate may rise again"
    )


def _change_fields(
    run: RunDirectory, config: RunConfig, was: RunConfig, checkpoint: Checkpoint | None, console: Console
) -> None:
    """Make the new values of `changeable_fields` those of the run, and warn of them."""
    new, old = flatten(config_to_json(config)), flatten(config_to_json(was))
    names = changeable_fields(config.faults.spike_factor) | changeable_fields(was.faults.spike_factor)
    names |= {"batch.micro_sequences"}  # which the warm-up may have lowered
    changed = [name for name in old if name in names and new[name] != old[name]]
    if not changed:
        return
    values: dict[str, Any] = run.read_config()
    for name in changed:
        group, _, field_name = name.partition(".")
        values[group] = {**values[group], field_name: new[name]}
    step = 0 if checkpoint is None else checkpoint.step
    change_config(run, values, step=step)
    shown = ", ".join(f"{name} = {new[name]} (was {old[name]})" for name in changed)
    console.warn(
        f"{shown} from step {step} on: the run may end as another one, not bit for bit what it would have been"
    )


def _restore_tokenizer(run: RunDirectory, tokenizer: Tokenizer, console: Console) -> None:
    """Write the run's tokenizer/ again where it is lost or damaged. UserError where the run was trained with another
    tokenizer."""
    recorded = run.recorded().get("tokenizer_fingerprint")
    if recorded is not None and recorded != tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer is not the one that {run.path} was trained with (fingerprint {tokenizer.fingerprint[:12]}, "
            f"was {str(recorded)[:12]}): bring the corpus, or the folder that tokenizer.path names, back to resume"
        )
    try:
        if load_tokenizer(run.tokenizer_path).fingerprint == tokenizer.fingerprint:
            return
        problem = f"{run.tokenizer_path} holds another tokenizer than the run was trained with"
    except UserError as error:
        problem = str(error)
    tokenizer.save(run.tokenizer_path)
    console.warn(f"{problem}: written again")


def _record_resume(
    run: RunDirectory, facts: Mapping[str, object], evidence: Evidence, checkpoint: Checkpoint | None, console: Console
) -> None:
    """Record in run.json which process resumes the run, and keep its code where that differs from the first one's.
    What a lost or damaged run.json no longer says is filled in with what this process knows."""
    record = run.recorded()
    if "data_fingerprint" not in record:
        record = {**facts, **record, "repaired": facts["start"]}
        run.replace_provenance(record)
        console.warn(f"{run.provenance_path} was lost or damaged: it now says what this process knows")
    resumes = list_in(record, "resumes")
    if facts["code_fingerprint"] != record.get("code_fingerprint"):
        own = f"code/resume-{len(resumes) + 1}"
        run.write_files({f"{own}/{name}": content for name, content in evidence.code.files.items()})
    saved = None if checkpoint is None else saved_identity(checkpoint.state, checkpoint.path)
    run_id = recorded_id(run) or (saved["id"] if saved is not None else uuid.uuid4().hex)
    resume = {name: facts[name] for name in RESUME_FACTS}
    run.set_status("running", resumes=[*resumes, resume], run_id=run_id, config_sha256=json_sha256(run.read_config()))
