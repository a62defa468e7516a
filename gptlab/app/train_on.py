"""`--resume RUN --steps MORE`: a finished run trains on, by a schedule that is new from there on."""

from __future__ import annotations

from gptlab.app.repeat import recorded_facts
from gptlab.app.run_request import RunRequest
from gptlab.app.session import Session
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.config.run import RunConfig
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.identity import change_config
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import Checkpoint


def lengthened(request: RunRequest, stored: RunConfig, run: RunDirectory) -> RunConfig | None:
    """The configuration of a finished run with the length that is asked for beside --resume; None where it is not
    finished, or something else is asked for."""
    longer = request.with_length(stored)
    if longer == stored or request.disagreements(longer) or recorded_facts(run).get("status") != "finished":
        return None
    return longer


def require_longer(session: Session, checkpoint: Checkpoint) -> None:
    """UserError where the run would be at its end before its first step."""
    step, seconds = checkpoint.step, checkpoint.state["train_seconds"]
    horizon = session.config.horizon
    if session.finish.progress(step, seconds) >= 1.0:
        raise UserError(
            f"{horizon} is no more than the run has trained already ({step:,} steps, {seconds:.1f} s): to train it on, "
            "give the length of the whole run, what it has trained included"
        )
    loss = checkpoint.state["val_loss"]
    if horizon.until_val_loss is not None and loss is not None and loss <= horizon.until_val_loss:
        raise UserError(
            f"the run has reached the validation loss {horizon.until_val_loss:g} already ({loss:.4f}): to train it on, "
            "give a lower --until-val-loss"
        )


def train_on(run: RunDirectory, session: Session, checkpoint: Checkpoint, was: RunConfig, console: Console) -> None:
    """Make the new length that of the run, and say what it changes. On rank 0."""
    change_config(run, run.read_config() | {"horizon": config_to_json(session.config)["horizon"]}, step=checkpoint.step)
    done = session.finish.progress(checkpoint.step, checkpoint.state["train_seconds"])
    console.warn(
        f"training on from step {checkpoint.step} to {session.config.horizon} (was {was.horizon}): the schedule is a "
        f"new one, {done:.0%} of which is done, so that the learning rate may rise again"
    )
