"""A run that is resumed: its newest intact checkpoint, what must be as it was, and what is written again."""

from __future__ import annotations

from collections.abc import Mapping

from gptlab.app.repeat import recorded_facts
from gptlab.app.session import Session
from gptlab.config.errors import UserError
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import (
    config_sha256,
    edited_field,
    new_run_id,
    recorded_id,
    require_own,
    saved_identity,
)
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.provenance import RESUME_FACTS, Evidence
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import Checkpoint, list_checkpoints
from gptlab.training.parallel.agreement import same_checkpoint


def newest_checkpoint(run_directory: RunDirectory, console: Console, group: Group) -> Checkpoint | None:
    """The newest checkpoint that is intact for every rank; None where the run ended before its first one, and so
    starts again."""
    if group.broadcast("has checkpoints", bool(list_checkpoints(run_directory.checkpoints_path))):
        try:
            checkpoint = same_checkpoint(run_directory.checkpoints_path, group, console.warn)
            _require_same_run(run_directory, checkpoint, console)
            return checkpoint
        except UserError:
            if not group.is_main:
                group.barrier("an intact checkpoint")  # to which rank 0 does not come: it says what is wrong
            raise
    metrics = read_metrics(run_directory.metrics_path) if group.is_main and run_directory.metrics_path.exists() else []
    saved = [line.get("step") for line in metrics if line.get("kind") == "checkpoint"]
    if saved:
        raise UserError(
            f"no checkpoint in {run_directory.checkpoints_path}, though one of step {saved[-1]} was saved there: bring "
            "it back, or train in a new folder"
        )
    console.line(f"{run_directory.path} has no checkpoint yet: it begins anew")
    return None


def _require_same_run(run: RunDirectory, checkpoint: Checkpoint, console: Console) -> None:
    """UserError where the checkpoint is another run's, or config.json was edited since."""
    saved = saved_identity(checkpoint.state, checkpoint.path)
    if saved is None:
        console.warn(f"{checkpoint.path} was saved by an older gptlab: it does not say of which run it is")
        return
    require_own(run, saved, checkpoint.path)
    if (edited := edited_field(run, saved)) is not None:
        raise UserError(
            f"{run.config_path} was edited after {checkpoint.path.name} was saved ({edited}): undo that to resume, or "
            f"train the changed configuration in a folder of its own with --from {run.path}"
        )


def require_same_start(run_directory: RunDirectory, session: Session, checkpoint: Checkpoint | None) -> None:
    """UserError unless the data is what run.json and the checkpoint say the run was trained on, and, where a run with
    --init-from starts again, its first weights are those of the first start."""
    record = recorded_facts(run_directory)
    saved = None if checkpoint is None else saved_identity(checkpoint.state, checkpoint.path)
    if record and session.start is not None and record.get("init_from_fingerprint") != session.start.fingerprint:
        raise UserError(
            f"the weights of {session.config.init_from} are not those that {run_directory.path} began with "
            f"(fingerprint {session.start.fingerprint[:12]}): bring them back, or train in a new folder"
        )
    known = [record["data_fingerprint"]] if "data_fingerprint" in record else []
    for recorded in known if saved is None else [*known, saved.data_fingerprint]:
        if recorded != session.data.fingerprint:
            raise UserError(
                f"the data is not what {run_directory.path} was trained on (fingerprint {session.data.fingerprint}, "
                f"was {recorded}): bring the corpus back to resume"
            )


def record_resume(
    run: RunDirectory, facts: Mapping[str, object], evidence: Evidence, checkpoint: Checkpoint | None, console: Console
) -> None:
    """Note in run.json which process resumes the run, and keep its code where that is not the first one's. What a lost
    or damaged run.json no longer says is filled in with what this process knows."""
    record = recorded_facts(run)
    if "data_fingerprint" not in record:
        record = {**facts, **record, "repaired": facts["start"]}
        run.replace_provenance(record)
        console.warn(f"{run.provenance_path} was lost or damaged: it now says what this process knows")
    earlier = record.get("resumes")
    resumes = earlier if isinstance(earlier, list) else []
    if facts["code_fingerprint"] != record.get("code_fingerprint"):
        run.write_files(evidence.code_files(f"code/resume-{len(resumes) + 1}"))
    saved = None if checkpoint is None else saved_identity(checkpoint.state, checkpoint.path)
    run_id = recorded_id(run) or (saved.id if saved is not None else new_run_id())
    resume = {name: facts[name] for name in RESUME_FACTS}
    run.set_status("running", resumes=[*resumes, resume], run_id=run_id, config_sha256=config_sha256(run.read_config()))


def restore_tokenizer(run: RunDirectory, tokenizer: Tokenizer, console: Console) -> None:
    """Write the run's tokenizer/ again where it is lost or damaged. UserError where the run was trained with another
    than `tokenizer`."""
    recorded = recorded_facts(run).get("tokenizer_fingerprint")
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
