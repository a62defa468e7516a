"""The process between the lab and a candidate's: it isolates, limits, measures, and ends every process that is left.

It runs as a program (`supervise.py` starts it) and imports a few modules of the standard library: it starts in a
thirtieth of a second (dataclasses and pathlib would add half of that), and nothing that a candidate may change is
imported before the candidate is confined.

    guard       user, mount, PID, network and IPC namespaces, if the kernel lets an unprivileged user have them
      init      process 1 in there: mounts, measures, kills; nothing that the candidate may do reaches it
        candidate, without capabilities; whatever it starts stays below init, and dies with it

Without namespaces the guard itself is the subreaper: it adopts and finds orphans, but hides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import Any

POLL_SECONDS = 0.02
"""How late an exit is noticed."""
MEASURE_SECONDS = 0.1
"""Time between two looks at all processes; at 5 GB/s, the fastest that memory fills, 0.5 GB above the limit."""
SHARED_SECONDS = 1.0
OUTPUT_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""For helpers (torch's compile workers, multiprocessing's resource tracker) that end when their parent has ended."""
MAX_DECOYS = 2000

_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000  # CLONE_NEWUSER, NS, PID, NET, IPC
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_IN_OPEN, _IN_ISDIR = 0x20, 0x40000000
_OF_THE_KERNEL = "/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger"  # root could write settings there


def main() -> int:
    """`guard.py SPECIFICATION REPORT LIFE`: the path of a JSON object, which is removed; descriptors of the report and
    of a pipe that closes when the lab has died."""
    spec = json.loads(_read(sys.argv[1]))
    os.remove(sys.argv[1])
    report, life = int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(report, False)
    os.set_inheritable(life, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if not spec["isolate"]:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return _reported(spec, report, life, libc)
    try:
        _enter_namespaces(libc)
    except OSError as error:
        os.write(report, json.dumps({"error": str(error)}).encode())
        return 1
    if (init := os.fork()) == 0:
        os._exit(_reported(spec, report, life, libc))
    for descriptor in (0, 1, 2, report):
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])


def _enter_namespaces(libc: ctypes.CDLL) -> None:
    """This user keeps his number in there; the next child is process 1."""
    uid, gid = os.getuid(), os.getgid()
    _ok(libc.unshare(_NAMESPACES), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        _write(f"/proc/self/{name}", text)


def _reported(spec: dict[str, Any], report: int, life: int, libc: ctypes.CDLL) -> int:
    """Confine, supervise, and write the report. Returns the guard's exit code."""
    try:
        watch = _confine(spec, libc) if spec["isolate"] else None
        if sys.platform == "linux":
            libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that no other process of this user can trace it
        facts = _supervise(spec, life, libc, watch)
    except (OSError, subprocess.SubprocessError) as error:
        facts = {"error": str(error)}
    os.write(report, json.dumps(facts).encode())
    return int("error" in facts)


def _ok(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


# --- what a candidate can see and write


class _Watch:
    """Who opens a decoy is reported by inotify."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.paths: dict[int, str] = {}
        """{watch: the folder or file that it watches}."""

    def opened(self) -> list[str]:
        """Decoys that were opened since the last call."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self.descriptor, 65536):
                while events:
                    number, mask, _, length = struct.unpack_from("iIII", events)
                    name = events[16 : 16 + length].rstrip(b"\0").decode(errors="replace")
                    events = events[16 + length :]
                    if not mask & _IN_ISDIR:
                        found.append(os.path.join(self.paths.get(number, ""), name) if name else self.paths[number])
        return found


def _confine(spec: dict[str, Any], libc: ctypes.CDLL) -> _Watch:
    """Everything read-only but `writable`, decoys in the place of `hidden`, an empty TMPDIR and /dev/shm, a /proc of
    these processes only. Returns a watch over the decoys."""

    def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        words = [None if word is None else word.encode() for word in (source, target, kind, data)]
        _ok(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")

    def read_only(path: str, wanted: bool, recursive: int = _AT_RECURSIVE) -> None:
        attributes = struct.pack("=QQQQ", *((_MOUNT_ATTR_RDONLY, 0) if wanted else (0, _MOUNT_ATTR_RDONLY)), 0, 0)
        arguments = (_AT_FDCWD, path.encode(), recursive, attributes, ctypes.c_size_t(len(attributes)))
        _ok(libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments), f"read-only {path}")

    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # By descriptor, since some are inside of what is hidden.
    shown = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in [*spec["readable"], *spec["writable"]]]
    size = f"size={spec['limits']['output_bytes']},mode=0700"
    watch = _Watch(_ok(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify"))
    temporary, own = spec["temporary"], [path for path in ("/dev/shm",) if os.path.isdir(path)]
    for path, data in ((temporary, "size=1m,mode=0700"), *((path, size) for path in own)):
        mount("none", path, "tmpfs", _MS_NOSUID | _MS_NODEV, data)
    hidden = [path for path in spec["hidden"] if os.path.exists(path)]  # others were in what is empty now
    for number, path in enumerate(hidden):
        if os.path.isdir(path):
            names = _tree_of(path)
            mount("none", path, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=16m,mode=0700")
            for name, is_folder in names:
                _make(os.path.join(path, name), is_folder)
        else:
            decoy = os.path.join(temporary, str(number))
            _make(decoy, False)
            mount(decoy, path, None, _MS_BIND)
    for path, descriptor in shown:
        _make(path, os.path.isdir(f"/proc/self/fd/{descriptor}"))
        mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
    _make(temporary, True)
    read_only("/", True)
    mount("none", temporary, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for path in (*own, *filter(os.path.isdir, hidden)):  # whoever writes a decoy is found, and nothing of it stays
        read_only(path, False, recursive=0)
    for path in spec["writable"]:
        read_only(path, False)
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    for path in filter(os.path.exists, _OF_THE_KERNEL):
        mount(path, path, None, _MS_BIND)
        read_only(path, True)
    for path in hidden:
        found = _tree_of(path, [temporary, *(shown_path for shown_path, _ in shown)])
        for place in (path, *(os.path.join(path, name) for name, is_folder in found if is_folder)):
            number = _ok(libc.inotify_add_watch(watch.descriptor, place.encode(), _IN_OPEN), f"watch {place}")
            watch.paths[number] = place
    return watch


def _tree_of(root: str, without: list[str] | None = None) -> list[tuple[str, bool]]:
    """(path below `root`, whether it is a folder) of up to MAX_DECOYS entries, those nearest to the root. Nothing at or
    below a path of `without`."""
    found: list[tuple[str, bool]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in (without or ())]
        below = os.path.relpath(folder, root)
        found += [(os.path.normpath(os.path.join(below, name)), True) for name in folders]
        found += [(os.path.normpath(os.path.join(below, name)), False) for name in files]
    return sorted(found, key=lambda entry: entry[0].count(os.sep))[:MAX_DECOYS]


def _make(path: str, folder: bool) -> None:
    """An empty file or folder, if there is none."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path if folder else os.path.dirname(path))
    if not folder and not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


# --- what it may use


class _Tree:
    """The processes of the candidate."""

    def __init__(self, only_mine: bool, memory_bytes: int) -> None:
        self._all = only_mine  # in a PID namespace of its own, every process but this one
        self._cpu: dict[tuple[int, int], float] = {}
        self.peak_bytes, self._limit = 0, memory_bytes
        self._shared_at = (0, 0.0, 0)
        """Resident bytes when shared pages were last counted, when that was, and how much too many they were."""
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def processes(self) -> dict[int, list[str]]:
        """{process: the fields of its stat line after the name}, without zombies."""
        found: dict[int, list[str]] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc"):
                if name.isdigit() and int(name) != os.getpid():
                    with contextlib.suppress(OSError):
                        found[int(name)] = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
        if not self._all:
            known = {os.getpid()}
            grown = True
            while grown:
                more = {pid for pid, fields in found.items() if int(fields[1]) in known} - known
                known, grown = known | more, bool(more)
            found = {pid: fields for pid, fields in found.items() if pid in known}
        return {pid: fields for pid, fields in found.items() if fields[0] not in "ZX"}

    def measure(self) -> tuple[int, float, int]:
        """(processes, CPU seconds of all so far, bytes now)."""
        alive = self.processes()
        for pid, fields in alive.items():
            self._cpu[pid, int(fields[19])] = (int(fields[11]) + int(fields[12])) * self._tick
        used = self._memory(alive)
        self.peak_bytes = max(self.peak_bytes, used)
        # The kernel's sum lacks children that nobody waits for, the other what lived between two looks.
        return len(alive), max(_reaped_seconds() + self._alive_seconds(alive), sum(self._cpu.values())), used

    def _alive_seconds(self, alive: dict[int, list[str]]) -> float:
        return sum(sum(map(int, fields[11:15])) * self._tick for fields in alive.values())

    def _memory(self, alive: dict[int, list[str]]) -> int:
        """Resident bytes. Of several processes, a page that n of them share counts 1/n for each: the kernel looks at
        every page for that, so it is asked when they grow, when they may be above the limit, and once a second."""
        resident = {pid: int(fields[21]) * self._page for pid, fields in alive.items()}
        total, now = sum(resident.values()), time.monotonic()
        known, since, _ = self._shared_at
        if len(alive) > 1 and (total > min(known, self._limit) or now - since > SHARED_SECONDS):
            parts = 0
            for pid, alone in resident.items():
                try:
                    parts += 1024 * int(_read(f"/proc/{pid}/smaps_rollup").split("\nPss:")[1].split()[0])
                except (OSError, ValueError, IndexError):  # it has ended, or the kernel is older than 4.14
                    parts += alone
            self._shared_at = (total, now, total - parts)
        return total if len(alive) < 2 else max(0, total - self._shared_at[2])


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _reaped_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _size(paths: list[str]) -> int:
    """Bytes on disk below all paths."""
    total = 0
    for path in paths:
        entries = [path]
        for folder, _, files in os.walk(path):
            entries += [os.path.join(folder, name) for name in files]
        for entry in entries:
            with contextlib.suppress(OSError):
                total += os.lstat(entry).st_blocks * 512
    return total


def _supervise(spec: dict[str, Any], life: int, libc: ctypes.CDLL, watch: _Watch | None) -> dict[str, Any]:
    limits, isolated = spec["limits"], watch is not None
    outputs = [*spec["writable"], *([] if isolated else [spec["temporary"]])]
    size_before, log_before = _size(outputs), os.fstat(2).st_size
    began = time.monotonic()
    process = _begin(spec, libc, isolated)  # kept: subprocess reaps a process that nobody refers to
    candidate = process.pid
    for descriptor in (0, 1, 2):  # the candidate's alone: what reads its output must see the end of it
        if descriptor != 2 or not stat.S_ISREG(os.fstat(2).st_mode):  # its log stays, to be measured
            os.close(descriptor)
            os.open(os.devnull, os.O_RDWR)
    tree, code, broken, opened, left = _Tree(isolated, limits["memory_bytes"]), None, None, [], []
    next_measure = next_size = 0.0
    ended = cpu = 0.0
    while True:
        now = time.monotonic() - began
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == candidate:
                    code, ended = os.waitstatus_to_exitcode(reaped[1]), now
        if now >= next_measure or code is not None:
            number, cpu, used = tree.measure()
            next_measure = now + MEASURE_SECONDS
            printed = os.fstat(2).st_size - log_before
            broken = broken or _over(
                limits, processes=number, cpu_seconds=cpu, memory_bytes=used, printed_bytes=printed
            )  # fmt: skip
            if now >= next_size or code is not None:
                next_size = now + OUTPUT_SECONDS
                broken = broken or _over(limits, output_bytes=_size(outputs) - size_before)
            if code is not None and (not number or now - ended >= GRACE_SECONDS):
                break
        broken = broken or _over(limits, wall_seconds=now)
        opened += [] if watch is None else watch.opened()
        if broken or select.select([life], [], [], POLL_SECONDS)[0]:
            ended = ended or now
            break
    if code is not None:
        left = [_name(pid) for pid in tree.processes()]
    killed = _kill_all(tree, candidate)
    code = killed if code is None else code
    cpu = max(cpu, _reaped_seconds())
    return {
        "exit_code": code, "wall_seconds": ended, "cpu_seconds": cpu, "peak_bytes": tree.peak_bytes,
        "broken": broken, "left": left[:20],
        "opened": sorted({*opened, *([] if watch is None else watch.opened())})[:20],
    }  # fmt: skip


def _over(limits: dict[str, float], **used: float) -> str | None:
    return next((name for name, amount in used.items() if amount > limits[name]), None)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        return f"{pid}: {words[:200]}"
    return str(pid)


def _kill_all(tree: _Tree, candidate: int) -> int | None:
    """Kill what is left, until nothing is: stopped first, so that nothing forks faster than it is killed. Returns the
    exit code of the candidate, if it was still running."""
    code, until = None, time.monotonic() + 10
    if sys.platform != "linux":  # without /proc, those of its session are all that is known
        with contextlib.suppress(OSError):
            os.killpg(candidate, signal.SIGKILL)
    while time.monotonic() < until:
        alive = tree.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == candidate:
                    code = os.waitstatus_to_exitcode(reaped[1])
        except ChildProcessError:
            if not tree.processes():
                break
        time.sleep(0.002)
    return code


def _begin(spec: dict[str, Any], libc: ctypes.CDLL, isolated: bool) -> subprocess.Popen[bytes]:
    """Start the candidate, in a session of its own."""

    def confine() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its files in /proc would be root's
        with contextlib.suppress(OSError):  # when memory runs out, the kernel kills this first
            _write("/proc/self/oom_score_adj", "1000")
        size, hard = int(spec["limits"]["output_bytes"]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if isolated:
            number = 0
            while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
                number += 1
        if sys.platform == "linux":
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    return subprocess.Popen(
        spec["argv"], cwd=spec["cwd"], env=spec["environment"], preexec_fn=confine, start_new_session=True
    )


if __name__ == "__main__":
    sys.exit(main())
