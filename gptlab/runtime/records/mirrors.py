"""`log.to`: the metrics of a run also in TensorBoard, Weights & Biases or Trackio, each fed by a process of its own.

    training                                  a mirror's process (`mirror_process.py`)
    start it, wait for its import             import the library, report it
    train, and write metrics.jsonl            follow metrics.jsonl, at the lowest priority
    close its input, wait a little            send the last lines, end

metrics.jsonl is the queue between them: training hands nothing over and waits for nothing, however slow a server is.
A mirror that raises, dies or hangs costs one warning and its own figures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gptlab.config.errors import UserError, one_line
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.processes.own_python import own_python
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.run_directory import RunDirectory, recorded_id

_MIRROR = "from gptlab.runtime.records.mirror_process import main; sys.exit(main(sys.argv[1]))"
IMPORT_SECONDS = 60.0
"""The longest that a run waits for imports before its first step, so that they take no time of its training."""
OPEN_SECONDS = 5.0
"""The longest that it waits for a mirror to be open, which takes a second of computing, or minutes without a server."""
FINISH_SECONDS = 10.0
"""The longest that a run waits for mirrors at its end; what they still have to send is then lost to them."""


def require_mirrors(names: Sequence[str]) -> None:
    """UserError where a library is not installed."""
    # A folder `wandb`, which that library makes in the current one, is a namespace without a loader.
    specs = {name: importlib.util.find_spec(name) for name in names}
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if missing:
        raise UserError(
            f"log.to = {', '.join(missing)}: not installed; `pip install {' '.join(missing)}`, or leave it out"
        )


@contextmanager
def mirrored(names: Sequence[str], run: RunDirectory, config: Mapping[str, Any], console: Console) -> Iterator[None]:
    """Within the context, the lines that are appended to metrics.jsonl go to each mirror, too."""
    offset = run.metrics_path.stat().st_size
    about = {
        "run": str(run.path.absolute()), "name": run.path.absolute().name, "id": recorded_id(run), "offset": offset,
        "config": dict(config),
    }  # fmt: skip
    mirrors = [_Mirror(name, console) for name in names]
    try:
        deadline = time.monotonic() + IMPORT_SECONDS
        for mirror in mirrors:
            mirror.imported.wait(max(0.0, deadline - time.monotonic()))
            mirror.write(to_json(about) + "\n")
        deadline = time.monotonic() + OPEN_SECONDS
        for mirror in mirrors:
            mirror.opened.wait(max(0.0, deadline - time.monotonic()))
        yield
    finally:
        with console.busy("finishing " + ", ".join(names)):
            for mirror in mirrors:
                mirror.write(None)
            deadline = time.monotonic() + FINISH_SECONDS
            for mirror in mirrors:
                mirror.finish(run, offset, deadline)


class _Mirror:
    """A mirror's process, and the thread that reads what it reports."""

    def __init__(self, name: str, console: Console) -> None:
        self.name, self.console = name, console
        self.read_bytes = 0
        """How much of metrics.jsonl it has sent."""
        self.imported, self.opened = threading.Event(), threading.Event()
        self.warned = False
        self.process = subprocess.Popen(
            own_python(_MIRROR, name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            # A Ctrl-C is for the run. No session of its own: Linux shares the processor equally among sessions,
            # whatever the priorities in them (sched_autogroup).
            env=os.environ | {"OMP_NUM_THREADS": "1"}, process_group=0 if os.name != "nt" else None,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, name=f"gptlab-{name}", daemon=True)
        self.reader.start()

    def finish(self, run: RunDirectory, offset: int, deadline: float) -> None:
        """Wait until it has sent everything, or kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL) if os.name != "nt" else self.process.kill()
            self.process.wait()
            with run.metrics_path.open("rb") as file:
                file.seek(max(self.read_bytes, offset))
                unsent = file.read().count(b"\n")
            self._warn(f"not done {FINISH_SECONDS:.0f} s after the run: stopped, with {unsent} lines not sent")
        self.reader.join()
        if self.process.returncode:
            self._warn(f"its process ended with exit code {self.process.returncode}: off")

    def write(self, text: str | None) -> None:
        """To its input; None: the end."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, which `_read` reports
            if text is None:
                self.process.stdin.close()
            else:
                self.process.stdin.write(text.encode())
                self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                match json.loads(line):
                    case {"sent": int(count)}:
                        self.read_bytes = count
                    case {"imported": True}:
                        self.imported.set()
                    case {"opened": str(text)}:
                        self.opened.set()
                        self.console.line(f"{self.name}: {one_line(Exception(text))}")
                    case {"warning": str(text)}:
                        self._warn(f"{text}: off")
        self.imported.set()  # it never will be
        self.opened.set()

    def _warn(self, text: str) -> None:
        """Only the first reason, which is the closest to the cause."""
        if not self.warned:
            self.warned = True
            self.console.warn(f"{self.name}: {one_line(Exception(text))}; the run is not affected")
