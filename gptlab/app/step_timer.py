"""`python -m gptlab.app.step_timer ARGUMENTS SECONDS`: a run whose steps are made one at a time, when asked for.
The lab times two programs in turn with it (`lab/experiments/equal_time.py`). It writes no run folder.

ARGUMENTS are those of `gptlab.train()` that repeat a run, as one JSON object. On standard output comes one JSON object
a line: first `{"config": ..., "tokens_per_step": ..., "flops_per_step": ...}`, when data, model and compilation are
ready; then, for each line that is read from standard input, `{"step": N}` after one more step. The end of standard
input ends it. A start or a step that takes longer than SECONDS goes on, and standard error says which line it is at.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlab.app.run.run_request import RunRequest
    from gptlab.app.run.session import Session


def main(argv: list[str]) -> int:
    replies = os.fdopen(os.dup(1), "w")
    # What the candidate's code prints must not come between the replies, nor after its own error in the log: so this is
    # done before any of it is imported, and prints are not buffered.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    faulthandler.dump_traceback_later(float(argv[1]))
    from gptlab.app.run.run_request import request_from_values
    from gptlab.config.errors import EXIT_USAGE, UserError
    from gptlab.runtime.files.plain_file import to_json
    from gptlab.runtime.hardware.cpu import prepare_torch
    from gptlab.training.step import quiet_garbage

    prepare_torch()
    try:
        session = _open(request_from_values(None, json.loads(argv[0])))
        print(to_json(_description(session)), file=replies, flush=True)
        faulthandler.cancel_dump_traceback_later()
        with session.state.loader, quiet_garbage():
            for _ in sys.stdin:
                faulthandler.dump_traceback_later(float(argv[1]))
                print(to_json({"step": _step(session)}), file=replies, flush=True)
                faulthandler.cancel_dump_traceback_later()
    except UserError as error:
        print(f"gptlab: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _open(request: RunRequest) -> Session:
    """The run as `train` would begin it, compiled. UserError where it could not."""
    from gptlab.app.run.attempt import Attempt
    from gptlab.app.run.earlier_run import open_repeated
    from gptlab.app.run.session import open_session
    from gptlab.runtime.hardware.place import place_of
    from gptlab.runtime.records.console import QuietConsole

    console = QuietConsole()
    attempt = Attempt(console, [], time.perf_counter())
    earlier = open_repeated(request, attempt)
    assert attempt.config is not None
    session = open_session(attempt.config, place_of(earlier.as_recorded(attempt.config)), console)
    session.warm_up(console.warn)
    return session


def _description(session: Session) -> dict[str, Any]:
    from gptlab.config.load import config_to_json

    tokens = session.config.batch.total_tokens
    return {
        "config": config_to_json(session.config),
        "tokens_per_step": tokens,
        "flops_per_step": tokens * session.flops.total,
    }


def _step(session: Session) -> int:
    """Train one step as the run would, as its schedule begins; the number of steps made."""
    from gptlab.config.errors import UserError
    from gptlab.training.faults import Fault
    from gptlab.training.loop import next_steps
    from gptlab.training.step import collect_garbage

    state = session.state
    for step in next_steps(state, session.passes.loss_sum, session.config, session.finish, lambda after: True):
        if isinstance(step.result, Fault):
            raise UserError(f"the steps cannot be timed: {step.result}")
        state.count_step(step.loss, session.config.faults)
    collect_garbage(state.step)
    return state.step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
