"""A candidate's process under limits: what it used, and what it left behind. `guard.py` does the work."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from gptlab.config.errors import UserError, cannot
from gptlab.lab.judge.rules import Rule, RuleError
from gptlab.runtime.files.cache import cache_root

GUARD = Path(__file__).with_name("guard.py")
GUARD_SECONDS = 30.0
"""How much longer than its limit a guard is waited for: it kills for 10 s at most."""

_PASSED_ON = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|CC|CXX|PYTHONDONTWRITEBYTECODE"
    r"|(OMP|KMP|GOMP|MKL|ONEDNN|ATEN|CUDA|NVIDIA|HIP|ROCR|TORCH|TORCHINDUCTOR|TRITON|PYTORCH)_(?!\w*CACHE_(DIR|PATH))\w+"
)
"""Variables that a candidate's process gets: what computing needs, no secrets, and no folder of compiled code that
others use. Timing a size sets TORCHINDUCTOR_CACHE_DIR; what a baseline compiled there, a candidate compiled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For a process with all of its descendants."""

    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    """Resident; what several processes share counts once."""
    output_bytes: int = 2**32
    """Of one file, and of everything below `writable` together."""
    printed_bytes: int = 2**24
    """Of what is added to its log."""
    processes: int = 256


@dataclass(frozen=True, slots=True)
class Finished:
    """How a supervised process ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    wall_seconds: float
    cpu_seconds: float
    """Of the process and all of its descendants."""
    peak_bytes: int
    broken: str | None
    """The field of Limits for which it was killed."""
    left: tuple[str, ...]
    """Processes that were still there a second after it had ended, each as `PID: COMMAND`. They were killed."""
    opened: tuple[str, ...]
    """Hidden files that were opened. Unknown (empty) without namespaces."""

    @property
    def timed_out(self) -> bool:
        return self.broken in ("wall_seconds", "cpu_seconds")

    def require_lawful(self, what: str) -> None:
        """RuleError for an exceeded limit, a process left behind, an opened hidden file. `what` ran, in words."""
        if self.broken is not None:
            rule, amount = _LIMIT_RULES[self.broken]
            raise RuleError(rule, f"{what} was stopped: {amount}")
        if self.opened:
            raise RuleError("private-files", f"{what} opened {', '.join(self.opened)}")
        if self.left:
            raise RuleError("left-behind", f"{what} left {len(self.left)} running: {', '.join(self.left)}")


_LIMIT_RULES: Mapping[str, tuple[Rule, str]] = {
    "wall_seconds": ("wall-clock", "it took longer than its limit"),
    "cpu_seconds": ("cpu-time", "it used more CPU seconds than its limit"),
    "memory_bytes": ("memory", "it used more memory than its limit"),
    "output_bytes": ("output-size", "it wrote more than its limit"),
    "printed_bytes": ("output-size", "it printed more than its limit"),
    "processes": ("processes", "it had more processes than its limit"),
}


def supervise(
    argv: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    limits: Limits,
    log: Path,
    hidden: Iterable[Path] = (),
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    isolate: bool | None = None,
) -> Finished:
    """Run `argv` to its end; its output is then appended to `log`. Afterwards none of its processes is left.

    In namespaces (`isolate`; None: where the kernel allows them) there is no network, the file system is read-only
    except for `writable`, TMPDIR and /dev/shm (both empty, and gone afterwards), and `hidden` folders hold empty files
    with the names of theirs. `readable` and `writable` are seen even inside of `hidden`. All paths must exist.
    UserError where the process cannot be started.
    """
    with printed_to(log, limits) as output, start(
        argv, cwd=cwd, environment=environment, limits=limits, hidden=hidden, readable=readable, writable=writable,
        isolate=isolate, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
    ) as running:  # fmt: skip
        return running.finish()


@contextmanager
def printed_to(log: Path, limits: Limits) -> Iterator[IO[bytes]]:
    """Within the context, an empty file for one process to print to; at its end, what it printed is appended to `log`.

    A process can open its own output for reading, so it would find in the log itself what earlier ones printed there.
    """
    with cannot(f"write {log}"):
        kept = log.open("ab", buffering=0)
    with kept, tempfile.TemporaryFile() as printed:
        try:
            yield printed
        finally:
            printed.seek(0)
            with suppress(OSError):  # a full disk is reported by what needs it
                kept.write(printed.read(limits.printed_bytes))


class Supervised:
    """A supervised process that runs."""

    def __init__(self, guard: subprocess.Popen[bytes], report: int, life: int, wall_seconds: float) -> None:
        self._guard, self._report, self._life, self._wall_seconds = guard, report, life, wall_seconds
        self._facts: dict[str, Any] | None = None

    @property
    def stdin(self) -> IO[bytes]:
        assert self._guard.stdin is not None
        return self._guard.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._guard.stdout is not None
        return self._guard.stdout

    def stop(self) -> None:
        """Have it killed with all of its descendants."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def finish(self) -> Finished:
        """Wait for its end. UserError where the guard could not start it, RuleError where the guard was killed."""
        if self._facts is None:
            try:
                code = self._guard.wait(self._wall_seconds + GUARD_SECONDS)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                code = self._guard.wait()
            self._facts = {"error": f"exit code {code}", "killed": code < 0}
            with open(self._report, "rb", closefd=False) as file, suppress(ValueError):
                self._facts = dict(json.load(file))
        facts = self._facts
        if facts.get("killed"):  # without namespaces, a process of the same user can
            raise RuleError("left-behind", "its guard was killed: what it used and left is unknown")
        if "error" in facts:
            raise UserError(f"cannot supervise a process: its guard failed ({facts['error']})")
        return Finished(**{**facts, "left": tuple(facts["left"]), "opened": tuple(facts["opened"])})


@contextmanager
def start(
    argv: Sequence[str | Path],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    limits: Limits,
    hidden: Iterable[Path] = (),
    readable: Iterable[Path] = (),
    writable: Iterable[Path] = (),
    isolate: bool | None = None,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[Supervised]:
    """The same as `supervise`, within the context, with pipes. At the end of the context it is killed if it runs."""
    isolate = why_not_isolated() is None if isolate is None else isolate
    with tempfile.TemporaryDirectory(prefix="gptlab-judge-") as temporary:
        spec = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd.resolve()),
            "environment": {**environment, "TMPDIR": temporary},
            "limits": asdict(limits),
            "hidden": _outermost(hidden),
            "readable": [str(path.resolve()) for path in readable],
            "writable": [str(path.resolve()) for path in writable],
            "temporary": temporary,
            "isolate": isolate,
        }
        report, report_end = os.pipe()
        life_end, life = os.pipe()
        # A file, since Linux passes 128 KiB of an argument at most, and paths of a corpus may be more.
        specification = Path(temporary, "specification.json")
        specification.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-I", "-S", "-B", str(GUARD), str(specification), str(report_end), str(life_end)]
        try:
            with cannot("start a supervised process"):
                guard = subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=(report_end, life_end), close_fds=True,
                    start_new_session=True, bufsize=0,
                )  # fmt: skip
        except UserError:
            os.close(report)
            os.close(life)
            raise
        finally:
            os.close(report_end)
            os.close(life_end)
        running = Supervised(guard, report, life, limits.wall_seconds)
        try:
            with guard:
                try:
                    yield running
                finally:
                    running.stop()
                    running.finish()
        finally:
            os.close(report)


def _outermost(paths: Iterable[Path]) -> list[str]:
    """Those that are not inside of another one, which hides them already."""
    found = {path.resolve() for path in paths}
    return sorted(str(path) for path in found if not found & set(path.parents))


def candidate_environment(tree: Path, cache: Path) -> dict[str, str]:
    """The variables of a process that runs the code in `tree`, with its compiled code in `cache`: few of the lab's own,
    none of its secrets. Training and answers get the same, so that they compute on the same device."""
    passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    # git's own file may be among what is hidden, if the corpus is a home folder.
    return passed_on | {"PYTHONPATH": str(tree), "GPTLAB_CACHE": str(cache), "GIT_CONFIG_GLOBAL": os.devnull}


def copy_compiled(cache: Path, copy: Path) -> None:
    """Compiled code, if there is any, need not be compiled again, and no candidate's cache serves another."""
    copy.mkdir(parents=True, exist_ok=True)
    if cache.exists():
        with suppress(shutil.Error):  # files that another worker's compiler renamed meanwhile
            shutil.copytree(cache, copy, symlinks=True, dirs_exist_ok=True)


def texts_in_cache() -> list[Path]:
    """Folders of the user's cache that may hold validation text: to be hidden from candidates."""
    folders = (cache_root(None) / name for name in ("tokens", "hub", "downloads"))
    return [folder for folder in folders if folder.is_dir()]


@functools.cache
def why_not_isolated() -> str | None:
    """None where an unprivileged process can have namespaces of its own here; otherwise why not. Tried once, with all
    that a candidate's process needs."""
    limits = Limits(wall_seconds=10, cpu_seconds=10, memory_bytes=2**30)
    try:
        with tempfile.TemporaryDirectory() as folder:
            started = start([sys.executable, "-I", "-S", "-c", ""], cwd=Path(folder), environment={}, limits=limits,
                            hidden=[Path(folder)], readable=[Path(folder)], isolate=True)  # fmt: skip
            with started as running:
                code = running.finish().exit_code
                return None if code == 0 else f"exit code {code}"
    except (UserError, OSError) as error:
        return str(error)
