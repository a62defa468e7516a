"""Processes under limits: what is measured, found, killed and hidden."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from forked import Forked
from mutations.mutation import ROOT

from gptlab.config.errors import UserError
from gptlab.lab.judge import guard
from gptlab.lab.judge.guard import MAX_DECOYS, _tree_of
from gptlab.lab.judge.rules import Rule, RuleError
from gptlab.lab.judge.supervise import _LIMIT_RULES, Finished, Limits, start, supervise, why_not_isolated

LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_bytes=2**28, output_bytes=2**20, processes=8)
BOTH_WAYS = [False, True] if sys.platform == "linux" and why_not_isolated() is None else [False]


def run(folder: Path, program: str, **options: object) -> Finished:
    argv = [sys.executable, "-I", "-S", "-c", textwrap.dedent(program)]
    return supervise(argv, cwd=folder, environment={}, log=folder / "log.txt", **{"limits": LIMITS, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("isolate", BOTH_WAYS)
def test_what_an_honest_process_used(isolate: bool, tmp_path: Path) -> None:
    program = """
    import os, subprocess, sys, time
    burn = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", burn])
    held = b"x" * 2**26
    open("out/file", "wb").write(bytes(100_000))
    time.sleep(0.25)
    print("done", os.getcwd(), os.getppid() == 1)
    sys.exit(7)
    """
    (tmp_path / "out").mkdir()
    limits = replace(LIMITS, output_bytes=200_000)
    finished = run(tmp_path, program, isolate=isolate, writable=[tmp_path / "out"], limits=limits)
    assert (finished.exit_code, finished.broken, finished.left) == (7, None, ())
    assert 0.3 < finished.cpu_seconds < 2
    assert 0.5 < finished.wall_seconds < 20
    assert 2**26 < finished.peak_bytes < 2**27
    assert (tmp_path / "log.txt").read_text() == f"done {tmp_path} {isolate}\n"
    finished.require_lawful("training")


@pytest.mark.skipif(sys.platform != "linux", reason="opens its output anew in /proc")
def test_a_process_cannot_read_what_an_earlier_one_printed(tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path, "print(repr(open('/proc/self/fd/1').read()), open('/proc/self/fd/2').tell())")
    assert (tmp_path / "log.txt").read_text() == "'' 0\n" * 2


def test_shared_pages_count_once(tmp_path: Path) -> None:
    """Three processes share 64 MiB; then each writes its own."""
    program = """
    import os, time
    held = bytearray(2**26)
    def write():
        for place in range(0, 2**26, 4096): held[place] += 1
    write()
    for _ in range(2):
        if os.fork() == 0:
            if not SHARES: write()
            time.sleep(0.5 if SHARES else 1.5)
            os._exit(0)
    os.wait(), os.wait()
    """
    limits = replace(LIMITS, memory_bytes=2**30)
    assert run(tmp_path, program.replace("SHARES", "True"), limits=limits).peak_bytes < 2**27
    assert run(tmp_path, program.replace("SHARES", "False"), limits=limits).peak_bytes > 2.5 * 2**26


@pytest.mark.parametrize("isolate", BOTH_WAYS)
def test_a_lower_limit_on_file_sizes_stays(isolate: bool, tmp_path: Path) -> None:
    """That of `ulimit -f`, which only root may raise."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
        run(tmp_path, "import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE))", isolate=isolate)

    output, _ = Forked(limited).communicate()
    assert (tmp_path / "log.txt").read_text() == f"({2**19}, {2**19})\n", output


def test_the_signal_that_ended_it(tmp_path: Path) -> None:
    assert run(tmp_path, "import os; os.kill(os.getpid(), 15)").exit_code == -15


@pytest.mark.parametrize("isolate", BOTH_WAYS)
def test_orphans_are_found_and_killed(isolate: bool, tmp_path: Path) -> None:
    """One left its session, one ignores signals."""
    program = """
    import os, signal, time
    for ignores in (False, True):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if ignores:
                    for number in range(1, 30):
                        try: signal.signal(number, signal.SIG_IGN)
                        except OSError: pass
                open(f"out/{ignores}", "w").write("an orphan of test_supervise")
                time.sleep(1000)
            os._exit(0)
    while len(os.listdir("out")) < 2: time.sleep(0.01)
    """
    (tmp_path / "out").mkdir()
    finished = run(tmp_path, program, isolate=isolate, writable=[tmp_path / "out"])
    assert (finished.exit_code, len(finished.left)) == (0, 2)
    assert "import os, signal, time" in finished.left[0]
    found = [process for process in psutil.process_iter(["cmdline"]) if program[:40] in str(process.info["cmdline"])]
    assert found == []
    with pytest.raises(RuleError, match="left 2 running"):
        finished.require_lawful("training")


@pytest.mark.parametrize(
    ("limit", "amount", "program"),
    [
        ("wall_seconds", 0.5, "import time; time.sleep(60)"),
        ("cpu_seconds", 0.3, "while True: pass"),
        ("memory_bytes", 2**25, "x = b'x' * 2**26\nimport time; time.sleep(60)"),
        ("printed_bytes", 2**16, "import time; print('x' * 2**17, flush=True); time.sleep(60)"),
        ("processes", 2, "import os, time; os.fork(); os.fork(); time.sleep(60)"),
    ],
)
def test_a_limit_ends_it(limit: str, amount: float, program: str, tmp_path: Path) -> None:
    limits = replace(LIMITS, **{limit: amount})
    finished = run(tmp_path, program, limits=limits)
    assert (finished.broken, finished.exit_code) == (limit, -signal.SIGKILL)
    assert finished.timed_out == (limit in ("wall_seconds", "cpu_seconds"))
    with pytest.raises(RuleError) as caught:
        finished.require_lawful("training")
    assert caught.value.rule == _LIMIT_RULES[limit][0]


def test_every_limit_has_a_rule() -> None:
    assert set(_LIMIT_RULES) == set(Limits.__slots__)
    assert {rule for rule, _ in _LIMIT_RULES.values()} < set(get_args(Rule))


def test_the_page_says_what_each_rule_is() -> None:
    page = (ROOT / "docs" / "judge.md").read_text(encoding="utf-8")
    table = page.partition("| rule | what it says |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(.+?)` \| .+ \|$", table, re.M) == [*get_args(Rule)]


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot supervise a process.*No such file"):
        supervise(["./nothing"], cwd=tmp_path, environment={}, limits=LIMITS, log=tmp_path / "log.txt")


@pytest.mark.parametrize("isolate", BOTH_WAYS)
def test_when_the_lab_dies_so_does_the_candidate(isolate: bool, tmp_path: Path) -> None:
    """Its end of the pipe closes, whatever killed it."""
    argv = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(1000)"]
    before = time.monotonic()
    with start(argv, cwd=tmp_path, environment={}, limits=LIMITS, isolate=isolate) as running:
        assert os.read(running.stdout.fileno(), 3) == b"up\n"
        running.stop()
        finished = running.finish()
    assert (finished.exit_code, finished.broken) == (-signal.SIGKILL, None)
    assert time.monotonic() - before < 20


def test_a_guard_that_is_killed(tmp_path: Path) -> None:
    """Without namespaces, its candidate can."""
    with pytest.raises(RuleError, match="its guard was killed"):
        run(tmp_path, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)", isolate=False)


@pytest.mark.skipif(sys.platform != "linux", reason="needs waitid")
def test_a_process_that_ends_before_its_guard_has_looked(tmp_path: Path) -> None:
    """Its exit code is the guard's to read, whatever subprocess does with an object that is not used any more."""
    limits = {**asdict(LIMITS), "wall_seconds": 2.0}
    spec = {
        "argv": [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"], "cwd": str(tmp_path), "environment": {},
        "limits": limits, "writable": [], "temporary": str(tmp_path), "isolate": False,
    }  # fmt: skip
    report = tmp_path / "report.json"

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def work() -> None:
        life, end = os.pipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", Ended)
            facts = guard._supervise(spec, life, ctypes.CDLL(None, use_errno=True), None)
        report.write_text(json.dumps(facts))
        os.close(end)

    process = Forked(work)
    process.communicate(timeout=30)
    facts = json.loads(report.read_text())
    assert (facts["exit_code"], facts["broken"]) == (7, None)


@pytest.mark.skipif(True not in BOTH_WAYS, reason="this machine gives users no namespaces")
def test_what_namespaces_hide(tmp_path: Path) -> None:
    program = """
    import os, socket
    def attempt(work):
        try:
            return work()
        except OSError as error:
            return type(error).__name__
    print(attempt(lambda: open("private/secret").read()))
    print(attempt(lambda: open("private/runs/mine", "w").write("kept")))
    print(attempt(lambda: open("other", "w")))
    print(attempt(lambda: open("/tmp/other-of-test-supervise", "w")))
    print(attempt(lambda: socket.create_connection(("127.0.0.1", 9), 1)))
    print(attempt(lambda: os.kill(1, 9)), sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
    print(attempt(lambda: os.setuid(0)), attempt(lambda: os.chroot("/tmp")))
    """
    runs = tmp_path / "private/runs"
    runs.mkdir(parents=True)
    (tmp_path / "private/secret").write_text("secret")
    finished = run(tmp_path, program, isolate=True, hidden=[tmp_path / "private"], writable=[runs])
    said = (tmp_path / "log.txt").read_text().splitlines()
    assert said[:4] == ["", "4", "OSError", "OSError"]
    assert said[4] in ("OSError", "ConnectionRefusedError")
    assert said[5] == "None [1, 2]"  # process 1 is not killed by those inside
    assert said[6].endswith("PermissionError")
    assert (finished.exit_code, finished.opened) == (0, (str(tmp_path / "private/secret"),))
    assert [(path.name, path.read_text()) for path in runs.iterdir()] == [("mine", "kept")]


@pytest.mark.skipif(True not in BOTH_WAYS, reason="this machine gives users no namespaces")
def test_a_hidden_file(tmp_path: Path) -> None:
    """What others open meanwhile, such as the null device, is not reported."""
    (tmp_path / "secret").write_text("secret")
    program = "import sys\nopen('/dev/null').close()\nif {opens}: print(repr(open('secret').read()))"
    for opens in (False, True):
        finished = run(tmp_path, program.format(opens=opens), isolate=True, hidden=[tmp_path / "secret"])
        assert (finished.exit_code, finished.opened) == (0, (str(tmp_path / "secret"),) * opens)
    assert (tmp_path / "log.txt").read_text() == "''\n"


@pytest.mark.skipif(True not in BOTH_WAYS, reason="this machine gives users no namespaces")
def test_a_temporary_file_where_the_corpus_is_the_folder_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are so many folders in it that no decoy has the name of the one for temporary files."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number in range(MAX_DECOYS):
        (tmp_path / f"{number}").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "deep" / "er"))
    program = "import tempfile\ntempfile.TemporaryFile(dir=__import__('os').environ['TMPDIR']).close()\nprint('made')"
    (tmp_path / "lab").mkdir()
    finished = run(tmp_path / "lab", program, isolate=True, hidden=[tmp_path], writable=[tmp_path / "lab"])
    assert (finished.exit_code, finished.opened) == (0, ())


@pytest.mark.skipif(True not in BOTH_WAYS or not os.access("/dev/shm", os.W_OK), reason="not on this machine")
def test_what_is_in_shared_memory_is_hidden_and_shown_there_too(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        corpus, shown = Path(folder, "corpus"), Path(folder, "lab")
        for path in (corpus, shown):
            path.mkdir()
            (path / "text").write_text("content")
        program = f"import os\nprint(os.path.exists({str(corpus / 'text')!r}), open({str(shown / 'text')!r}).read())"
        finished = run(tmp_path, program, isolate=True, hidden=[corpus], readable=[shown])
    assert (tmp_path / "log.txt").read_text() == "False content\n"
    assert (finished.exit_code, finished.opened) == (0, ())


@pytest.mark.skipif(True not in BOTH_WAYS, reason="this machine gives users no namespaces")
def test_the_kernels_settings_cannot_be_written(tmp_path: Path) -> None:
    """Those of root are open to root, with or without capabilities."""
    run(tmp_path, "open('/proc/sys/kernel/core_pattern', 'r+')", isolate=True)
    assert ("Read-only file system" if os.getuid() == 0 else "Permission denied") in (tmp_path / "log.txt").read_text()


def test_of_many_files_those_near_the_root_have_decoys(tmp_path: Path) -> None:
    """The validation text is near it, the experiments of a long night are not."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "z").mkdir()
    for number in range(MAX_DECOYS):
        (tmp_path / f"a/b/{number}").touch()
    (tmp_path / "z/val.bin").touch()
    found = _tree_of(str(tmp_path))
    assert len(found) == MAX_DECOYS
    assert found[:2] in ([("a", True), ("z", True)], [("z", True), ("a", True)])
    assert ("z/val.bin", False) in found


@pytest.mark.skipif(True not in BOTH_WAYS, reason="this machine gives users no namespaces")
def test_a_hidden_folder_inside_of_a_hidden_one(tmp_path: Path) -> None:
    """As the folder of a run, in the lab that it is a part of; what is readable inside of both is seen."""
    inner = tmp_path / "lab" / "runs" / "seed-1"
    (inner / "shown").mkdir(parents=True)
    for path in (tmp_path / "lab" / "ledger", inner / "weights", inner / "shown" / "config"):
        path.write_text("content")
    program = f"""
    from pathlib import Path
    lab, inner = Path({str(tmp_path / "lab")!r}), Path({str(inner)!r})
    seen = [path.read_text() for path in (lab / "ledger", inner / "weights", inner / "shown/config")]
    print(len("".join(seen[:2])), seen[2])
    """
    finished = run(tmp_path, program, isolate=True, hidden=[inner, tmp_path / "lab"], readable=[inner / "shown"])
    assert (tmp_path / "log.txt").read_text() == "0 content\n"
    assert finished.exit_code == 0
