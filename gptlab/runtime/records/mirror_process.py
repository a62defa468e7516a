"""The process of a mirror (`mirrors.py` starts it): sends the lines of a metrics.jsonl to one library.

On stdin: one line of JSON about the run, then its end when no more lines come. On stdout: JSON lines of what happens.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptlab.runtime.files.plain_file import to_json

PROJECT = "gptlab"
POLL_SECONDS = 1.0
READ_BYTES = 1 << 18
"""About a thousand lines at a time."""
LAST_SECONDS = 30.0
"""A process whose run is over ends after this long, even if the run was killed and cannot end it."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "train": {
        "loss_ema": "train/loss", "loss": "train/step_loss", "lr_scale": "train/lrm", "grad_norm": "train/grad_norm",
        "step_seconds": "train/dt", "tokens_per_second": "train/tok_per_sec", "mfu": "train/mfu",
        "epoch": "train/epoch", "tokens": "total_training_tokens", "train_seconds": "total_training_time",
        "total_flops": "total_training_flops",
    },
    "eval": {
        "val_loss": "val/loss", "val_bpb": "val/bpb", "train_loss": "val/train_loss",
        "train_seconds": "total_training_time", "tokens": "total_training_tokens",
    },
    "core": {"core_metric": "core_metric", "train_seconds": "total_training_time"},
}  # fmt: skip
"""{kind of line: {its key: nanochat's name}}; `val/loss` is nanoGPT's. As in nanochat, `train/loss` is the smoothed
loss, and MFU is in percent."""


class Mirror(NamedTuple):
    log: Callable[[int, dict[str, float]], object]
    """Step, and {name: number}."""
    finish: Callable[[], object]
    where: str
    """What a person is told of it."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names elsewhere; empty for lines without any. Unknown numbers are skipped."""
    names = NAMES.get(str(line.get("kind")), {})
    found = {name: float(line[key]) for key, name in names.items() if line.get(key) is not None}
    if "train/mfu" in found:
        found["train/mfu"] *= 100
    centered = line.get("centered")
    if isinstance(centered, dict):
        found |= {f"centered_results/{label}": float(value) for label, value in centered.items()}
    return found


def tensorboard(about: Mapping[str, Any]) -> Mirror:
    """Event files in the run folder, so that `tensorboard --logdir runs` finds those of all runs."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = str(Path(about["run"], "tensorboard"))
    writer = EventFileWriter(folder)

    def log(step: int, values: dict[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    return Mirror(log, writer.close, f"tensorboard --logdir {folder}")


def wandb(about: Mapping[str, Any]) -> Mirror:
    """Online where there is a login, else in ./wandb for `wandb sync`. Its own variables ($WANDB_MODE, ...) decide."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or (None if wandb.login(prompt=False) else "offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=about["name"], id=about["id"], config=about["config"],
        resume="allow", mode=mode,
    )  # fmt: skip
    where = run.url or f"offline in {run.dir}"
    return Mirror(lambda step, values: run.log(values, step=step), run.finish, where)


def trackio(about: Mapping[str, Any]) -> Mirror:
    """In Trackio's local folder; $TRACKIO_SPACE_ID or $TRACKIO_SERVER_URL lead elsewhere."""
    import trackio

    trackio.init(
        project=PROJECT, name=about["name"], config=about["config"], resume="allow", embed=False, auto_log_gpu=False,
        auto_log_cpu=False,
    )  # fmt: skip
    return Mirror(
        lambda step, values: trackio.log(values, step=step), trackio.finish, f"trackio show --project {PROJECT}"
    )


OPEN: Mapping[str, Callable[[Mapping[str, Any]], Mirror]] = {
    "tensorboard": tensorboard, "wandb": wandb, "trackio": trackio,
}  # fmt: skip


def follow(path: Path, offset: int, ended: threading.Event) -> Iterator[tuple[list[bytes], int]]:
    """The complete lines from `offset` on as they come, with the offset after them, until `ended` is set and the file
    is read."""
    with path.open("rb") as file:
        while True:
            last = ended.is_set()
            file.seek(offset)
            lines = file.readlines(READ_BYTES)
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            if lines:
                offset += sum(map(len, lines))
                yield lines, offset
            elif last:
                return
            else:
                ended.wait(POLL_SECONDS)


def main(name: str) -> int:
    reports = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what libraries print is for nobody

    def report(**what: object) -> None:
        with suppress(OSError):  # the run was killed
            print(to_json(what), file=reports, flush=True)

    try:
        importlib.import_module(name)
        with suppress(AttributeError, OSError):  # Windows
            os.nice(19)  # from here on, training goes first
        report(imported=True)
        about, ended = json.loads(sys.stdin.readline()), threading.Event()
        threading.Thread(target=_end_with_run, args=(ended,), daemon=True).start()
        mirror = OPEN[name](about)
        report(opened=mirror.where)
        for lines, offset in follow(Path(about["run"], "metrics.jsonl"), about["offset"], ended):
            for record in map(json.loads, lines):
                if values := scalars(record):
                    mirror.log(record["step"], values)
            report(sent=offset)
        mirror.finish()
    except BaseException as error:
        report(warning=f"{type(error).__name__}: {error}")
    return 0


def _end_with_run(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()
    time.sleep(LAST_SECONDS)
    os._exit(1)
