"""`gptlab train`: a recipe, a TOML file and flags in; a run folder and the closing block out."""

from __future__ import annotations

import time
from shutil import get_terminal_size

from gptlab.app.run.run_request import TrainArguments
from gptlab.cli.arguments.help import fitted
from gptlab.cli.arguments.parser import read_request
from gptlab.config.errors import EXIT_PREEMPTED

DESCRIPTION = "Train a GPT, or resume a run."


def main(argv: list[str]) -> int:
    started = time.perf_counter()
    request = read_request(argv, TrainArguments, prog="gptlab train", description=DESCRIPTION)
    if request.options.get("list"):
        return _list_recipes()
    from gptlab.app.run.attempt import stopped_early
    from gptlab.app.run.ranks import report_peer_failure
    from gptlab.app.run.train_run import train_run
    from gptlab.runtime.processes.liveness import PeerFailed
    from gptlab.training.signals import StoppedEarly

    try:
        return train_run(request, ["train", *argv], started).exit_code
    except StoppedEarly as stop:
        print(stopped_early(str(stop), None, request.resume))
        return EXIT_PREEMPTED
    except PeerFailed as failed:
        return report_peer_failure(failed)


def _list_recipes() -> int:
    from gptlab.cli.arguments.run_help import recipe_list

    print(fitted(recipe_list(), get_terminal_size().columns))
    return 0
