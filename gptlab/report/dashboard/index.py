"""The runs below a folder, kept up to date while somebody looks at them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from gptlab.lab.run_list import run_folders
from gptlab.report.dashboard.labs import WatchedLabs
from gptlab.report.dashboard.watched_run import WatchedRun

POLL_SECONDS = 1.0
"""Between two looks at the files of the runs that train."""
SCAN_SECONDS = 5.0
"""Between two looks for new runs, and at the files of all: for a thousand 0.1 s of computing, which should not be taken
from whoever trains."""
MAX_DEPTH = 5
"""Folders between the dashboard's folder and a run; labs/NAME/experiments/0007/runs/NAME takes five."""
MAX_RUNS = 20_000


class RunIndex:
    """The runs of a folder and the labs beside it. One thread refreshes them; any thread reads the rows.

    Every change gets the next version number, so that a reader asks for what changed since the version that it has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[Path, WatchedRun] = {}
        self._by_id: dict[str, WatchedRun] = {}
        self._versions: dict[str, int] = {}
        """{id of a run that is or was there: the version of its last change}."""
        self._labs = WatchedLabs(folder.resolve().parent / "labs")
        self._version = self._labs_version = 0
        self._loaded = False
        self._changed = threading.Condition()
        self._watchers = 0
        self._scanned = -math.inf

    def refresh(self) -> None:
        """Look for new runs, and read what is new of each. Only one thread may call this."""
        looks_at_all = time.monotonic() - self._scanned >= SCAN_SECONDS
        if looks_at_all:
            self._scan()
        for run in self._runs.values():
            if (looks_at_all or run.row.get("status") == "running") and run.refresh():
                self._publish(run.id)
        labs_changed = looks_at_all and self._labs.refresh()
        if labs_changed or not self._loaded:
            with self._changed:
                self._loaded = True
                self._version += 1
                self._labs_version = self._version
                self._changed.notify_all()
        for run in self._runs.values():
            if run.compare_with_recipe():
                self._publish(run.id)

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        found = dict.fromkeys(islice(run_folders(self.folder, MAX_DEPTH), MAX_RUNS))
        for path in [path for path in self._runs if path not in found]:
            gone = self._runs.pop(path)
            with self._changed:
                self._by_id.pop(gone.id, None)
            self._publish(gone.id)
        for path in (path for path in found if path not in self._runs):
            name = self.folder.resolve().name if path == self.folder else path.relative_to(self.folder).as_posix()
            run = self._runs[path] = WatchedRun(path, name)
            with self._changed:
                self._by_id[run.id] = run

    def _publish(self, run_id: str) -> None:
        with self._changed:
            self._version += 1
            self._versions[run_id] = self._version
            self._changed.notify_all()

    def run(self, run_id: object) -> WatchedRun | None:
        """The run of this id, if there is one."""
        with self._changed:
            return self._by_id.get(run_id) if isinstance(run_id, str) else None

    def changes(self, since: int, *, wait_seconds: float) -> dict[str, Any] | None:
        """What changed after version `since` (0: everything), as JSON; None if nothing does for `wait_seconds`.

        `rows`: new and changed rows; `gone`: ids of runs that are no more; `labs`, if they changed; `loaded`: whether
        every run has been read since somebody watches.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._version > since, wait_seconds):
                return None
            ids = [run_id for run_id, version in self._versions.items() if version > since]
            runs = {run_id: self._by_id.get(run_id) for run_id in ids}
            found: dict[str, Any] = {
                "version": self._version,
                "rows": [run.row for run in runs.values() if run is not None],
                "gone": [run_id for run_id, run in runs.items() if run is None],
                "loaded": self._loaded,
            }
            if self._labs_version > since:
                found["labs"] = self._labs.figures
            return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the context, `keep_fresh` refreshes. For the first watcher it looks for runs again, and only then are
        all of them loaded: what was read may be hours old."""
        with self._changed:
            if self._watchers == 0:
                self._loaded, self._scanned = False, -math.inf
            self._watchers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def keep_fresh(self, stop: threading.Event) -> None:
        """Refresh until `stop`, as often as `POLL_SECONDS` while somebody watches."""
        while not stop.is_set():
            self.refresh()
            stop.wait(POLL_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: self._watchers > 0 or stop.is_set())

    def wake(self) -> None:
        """Let all that wait look at what they wait for."""
        with self._changed:
            self._changed.notify_all()
