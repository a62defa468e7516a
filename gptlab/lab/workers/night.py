"""Many experiments in a row: a command proposes, the lab judges and keeps, until the time or the number is reached.

The command is any program. It is started for each experiment in a folder of its own with a copy of the baseline's
package, and proposes by changing that copy, by writing proposal.json, or both:

    gptlab/          the baseline's package, to be changed
    program.md       the instructions of the lab
    state.json       the baseline and every experiment so far, with verdicts (`overview.state`)
    proposal.json    written by the command: {"fields": {"optim.muon.lr": 0.03}, "why": "...", "expect": -0.01}

A command that exits with an error, or proposes nothing, is asked again after each of `PAUSES`; then the night ends.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import psutil

from gptlab.config.errors import UserError, cannot
from gptlab.lab.experiments.folder import Lab
from gptlab.lab.experiments.ledger import Experiment, baseline_of
from gptlab.lab.experiments.overview import proposals, state
from gptlab.lab.experiments.proposal import Proposal, changed_files, code_of, copy_package, read_proposal, submit
from gptlab.lab.experiments.trial import BusyError, finish, in_flight
from gptlab.runtime.files.plain_file import write_json_atomic
from gptlab.runtime.processes.ending_signals import ENDING_SIGNALS, ended_by_signals
from gptlab.runtime.processes.liveness import pid_space

PAUSES = (1.0, 10.0, 60.0, 300.0)
"""Seconds after the first, second, ... failure in a row to propose: a model's server may be away for minutes."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

Say = Callable[[str], None]
Propose = Callable[[Lab], Proposal | None]


@ended_by_signals()
def run_night(
    lab: Lab,
    propose: Propose,
    *,
    at_once: bool = False,
    experiments: int | None = None,
    until: float | None = None,
    say: Say,
    judged: Callable[[Experiment], None],
) -> None:
    """Try what `propose` proposes until there are `experiments` in the lab, or time.monotonic() is `until`. What is in
    flight and held by no other worker, because a night was killed, is finished first. Any number of processes may do
    this.

    Args:
        propose: The next proposal; None ends the night: there is nothing left to try.
        at_once: Proposing takes no time, so it is done under the ledger's lock: what one worker proposes depends on
            everything that the others have proposed.
        judged: Called with each experiment that has its verdict.

    UserError where nothing that can be tried is proposed, five times in a row with `PAUSES` between them.
    """
    failures = 0

    def finished(number: int) -> bool:
        """False where another worker judges the experiment."""
        try:
            judged(finish(lab, number, say))
        except BusyError:
            return False
        return True

    _remove_leftovers(lab)
    try:
        while until is None or time.monotonic() < until:
            if any(finished(number) for number in in_flight(lab)):
                continue  # There may be more by now.
            if _is_full(lab, experiments):
                say(f"--experiments {experiments} is reached: it counts those of earlier nights too")
                break
            try:
                with lab.ledger.locked() if at_once else nullcontext():
                    if (proposal := propose(lab)) is None:
                        say("nothing is left to try")
                        break
                    with lab.ledger.locked():
                        if _is_full(lab, experiments):  # by other workers, while this one thought
                            continue
                        number = submit(lab, proposal)
            except UserError as error:
                if until is not None and time.monotonic() >= until:
                    say(f"no proposal: {error}")
                    break
                if failures == len(PAUSES):
                    raise UserError(f"nothing to try, {failures + 1} times in a row; the last time: {error}") from None
                pause, failures = PAUSES[failures], failures + 1
                say(f"no proposal: {error}; the next attempt is in {pause:.0f} s")
                time.sleep(pause if until is None else max(0.0, min(pause, until - time.monotonic())))
                continue
            failures = 0
            finished(number)
    finally:
        shutil.rmtree(_work_folder(lab), ignore_errors=True)


def _work_folder(lab: Lab) -> Path:
    """Where the command of this process proposes."""
    return lab.path / "work" / f"{pid_space()}-{os.getpid()}"


def _remove_leftovers(lab: Lab) -> None:
    """The folders of this machine's processes that were killed since it was started."""
    for folder in (lab.path / "work").glob(f"{pid_space()}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_full(lab: Lab, experiments: int | None) -> bool:
    return experiments is not None and len(proposals(lab.ledger.experiments())) >= experiments


def nobody(lab: Lab) -> Proposal | None:
    """Proposes nothing: the night ends when it has finished what was in flight."""
    return None


def agent(command: str, timeout: float, until: float | None = None) -> Propose:
    """What `command` proposes. Its words are split as a shell does; those that name a file here are made absolute,
    since it runs in another folder. `timeout`: seconds that it may take for one proposal; `until`: time.monotonic() at
    which it is ended in any case. UserError where there is no such command."""
    words = [os.path.abspath(word) if os.path.isfile(word) else word for word in shlex.split(command)]
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--agent {command}: give a command of PATH, or a file here that may be executed")

    def propose(lab: Lab) -> Proposal:
        experiments = lab.ledger.experiments()
        baseline = baseline_of(experiments)  # Another worker may replace it while the command thinks.
        base = code_of(lab, baseline, experiments)
        folder = _work_folder(lab)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_package(base, folder)
        shutil.copyfile(lab.path / "program.md", folder / "program.md")
        write_json_atomic(folder / "state.json", state(lab))
        _run(words, folder, timeout if until is None else max(0.0, min(timeout, until - time.monotonic())))
        tree = folder if changed_files(base, folder) else None
        proposal = read_proposal(folder / "proposal.json", tree, by=Path(words[0]).name)
        if tree is None and not proposal.fields:
            raise UserError("the command changed nothing and wrote no fields to proposal.json")
        return replace(proposal, against=baseline.number)

    return propose


def _end_with_the_night(mask: set[signal.Signals]) -> None:
    """In the command's process: have it killed when that of the night is, which then cleans nothing up."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(words: Sequence[str], folder: Path, timeout: float) -> None:
    """UserError where the command fails or takes too long; all that it started ends with it."""
    log = folder.with_name(f"{folder.name}.log")
    with cannot(f"run {words[0]}"), log.open("ab") as output:
        # Blocked until there is a process to kill: an exception that a handler raises while Python forks is lost.
        mask = cast(set[signal.Signals], signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS))
        try:
            process = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=partial(_end_with_the_night, mask),
            )  # fmt: skip
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise UserError(f"the command did not propose anything within {timeout:.0f} s") from None
            finally:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if code:
        raise UserError(f"the command failed with exit code {code}; {log} has its output")
