"""The run directory: made once, locked by one process, whole after a kill, refused where it is no run."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from gptlab.config.errors import UserError
from gptlab.runtime.files import plain_file
from gptlab.runtime.files.plain_file import json_sha256
from gptlab.runtime.hardware import cpu
from gptlab.runtime.hardware.cpu import cpu_model
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.records import run_directory as run_directory_module
from gptlab.runtime.records.provenance import CodeSnapshot, provenance, take_code
from gptlab.runtime.records.run_directory import RunDirectory, default_run_path, write_json_atomic

CONFIG = {"schema_version": 1, "seed": 3}
FACTS = {"device": "cpu", "start": "2026-01-01T00:00:00+00:00"}


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize(("system", "refusals", "writes"), [("nt", 2, True), ("nt", 10**6, False), ("posix", 1, False)])
def test_who_reads_the_record_on_windows_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, refusals: int, writes: bool
) -> None:
    """No file that is open can be replaced there."""
    path, replace, left = tmp_path / "run.json", Path.replace, [refusals]

    def refuse(temporary: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] >= 0:
            raise PermissionError(errno.EACCES, "Access is denied")
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(plain_file, "_OPEN_SECONDS", 0.1)
    with monkeypatch.context() as patch, nullcontext() if writes else pytest.raises(UserError, match="denied"):
        patch.setattr(os, "name", system)
        write_json_atomic(path, {})
    assert entries(tmp_path) == ({"run.json"} if writes else set())


def test_why_a_run_failed_is_the_first_reason_and_gone_once_it_is_resumed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, FACTS)
    run.set_failed("the loss is nan", step=7, loss=float("nan"))
    run.set_failed("rank 1 died")
    record = run.read_provenance()
    assert (record["status"], record["failure"]) == (
        "failed",
        {"reason": "the loss is nan", "step": 7, "loss": "nan"},
    )
    run.set_status("running")
    assert run.read_provenance()["failure"] is None


def test_a_new_run_holds_its_configuration_and_provenance(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a" / "b", CONFIG, FACTS)
    assert json.loads((tmp_path / "a" / "b" / "config.json").read_text()) == CONFIG
    record = json.loads((tmp_path / "a" / "b" / "run.json").read_text())
    names = {"run_id": record["run_id"], "config_sha256": json_sha256(CONFIG)}
    assert record == FACTS | names | {"status": "running", "end": None, "failure": None}
    assert RunDirectory.open(run.path) == run
    assert run.read_config() == CONFIG
    assert {run.metrics_path.name, run.log_path.name, run.summary_path.name} == {
        "metrics.jsonl", "log.txt", "summary.json",
    }  # fmt: skip
    assert {run.tokenizer_path, run.checkpoints_path} == {run.path / "tokenizer", run.path / "checkpoints"}
    assert entries(run.path) - {".lock"} == {"config.json", "run.json"}  # nothing temporary stays


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG, FACTS)
    RunDirectory.open(tmp_path)


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)
    with pytest.raises(UserError, match="--resume"):
        RunDirectory.create(tmp_path / "r", {"seed": 4}, FACTS)
    assert run.read_config() == CONFIG


def test_of_two_processes_that_make_the_same_run_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BeatenToIt(FileLock):
        """The other process makes its run after this one has looked, and before it has the lock."""

        def acquire(self, *args: Any, **options: Any) -> Any:
            (tmp_path / "config.json").write_text(json.dumps(CONFIG))
            return super().acquire(*args, **options)

    monkeypatch.setattr(run_directory_module, "FileLock", BeatenToIt)
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.create(tmp_path, {"seed": 4}, FACTS)
    assert RunDirectory.open(tmp_path).read_config() == CONFIG


def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex"):
        RunDirectory.create(tmp_path, CONFIG, FACTS)
    assert entries(tmp_path) == {"thesis.tex"}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").touch()
    for path in (tmp_path / "r", tmp_path / "r" / "inside"):
        with pytest.raises(UserError, match="cannot make the run folder"):
            RunDirectory.create(path, CONFIG, FACTS)


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        RunDirectory.open(tmp_path / "missing")
    with pytest.raises(UserError, match="is not a run folder"):
        RunDirectory.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        RunDirectory.open(tmp_path).read_config()


def test_a_process_killed_while_making_a_run_leaves_none_and_blocks_none(tmp_path: Path) -> None:
    for stop_at in ("run.json", "config.json"):
        folder = tmp_path / stop_at
        code = f"""
            import os, signal
            from pathlib import Path
            from gptlab.runtime.records.run_directory import RunDirectory
            replace = Path.replace
            def killed(self, target):
                if Path(target).name == {stop_at!r}:
                    os.kill(os.getpid(), signal.SIGTERM)
                return replace(self, target)
            Path.replace = killed
            RunDirectory.create(Path({str(folder)!r}), {{}}, {{}})
        """
        assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode != 0
        with pytest.raises(UserError, match="is not a run folder"):
            RunDirectory.open(folder)
        RunDirectory.create(folder, CONFIG, FACTS)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("refused", ["run.json", "tokenizer", "config.json"])
def test_a_run_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, is_new: bool
) -> None:
    folder = tmp_path / "r"
    if not is_new:
        folder.mkdir()

    def write(path: Path, value: object) -> None:
        if path.name == refused:
            raise UserError("the disk is full")
        write_json_atomic(path, value)

    def contents(run: RunDirectory) -> None:
        run.tokenizer_path.mkdir()
        write_json_atomic(run.tokenizer_path / "half.json", {})
        if refused == "tokenizer":
            raise UserError("the disk is full")

    monkeypatch.setattr(run_directory_module, "write_json_atomic", write)
    with pytest.raises(UserError, match="the disk is full"):
        RunDirectory.create(folder, CONFIG, FACTS, contents=contents)
    assert entries(tmp_path) == (set() if is_new else {"r"})
    assert is_new or entries(folder) == set()
    monkeypatch.undo()
    RunDirectory.create(folder, CONFIG, FACTS)


def test_a_disk_too_full_for_the_lock_holders_name_does_not_keep_a_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)

    def full(path: Path, value: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(run_directory_module, "write_json_atomic", full)
    with run.lock(), pytest.raises(UserError, match="in use by another process;"):
        run.lock().__enter__()


def test_status_end_and_extra_facts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)
    run.set_status("preempted", compile_seconds=1.5)
    record = run.read_provenance()
    assert record | FACTS == record  # what was there stays
    assert (record["status"], record["compile_seconds"]) == ("preempted", 1.5)
    assert datetime.fromisoformat(str(record["end"])).utcoffset() is not None
    run.set_status("running")
    assert run.read_provenance()["end"] is None
    run.provenance_path.write_text("{ torn")
    run.set_status("finished")
    assert run.read_provenance()["status"] == "finished"


def test_the_lock_excludes_and_names_its_holder(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)
    with run.lock():
        with pytest.raises(UserError, match=rf"in use by another process \(pid {os.getpid()} on ") as error:
            run.lock().__enter__()
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match="in use"):
            RunDirectory(run.path).lock().__enter__()
    with run.lock():
        pass
    assert ".lock.json" not in entries(run.path)


def test_the_lock_is_released_when_the_run_fails(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)
    with pytest.raises(ZeroDivisionError), run.lock():
        _ = 1 / 0
    with run.lock():
        pass


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "r", CONFIG, FACTS)
    code = f"""
        import sys, time
        from pathlib import Path
        from gptlab.runtime.records.run_directory import RunDirectory
        with RunDirectory.open(Path({str(run.path)!r})).lock():
            print("locked", flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"locked"
        with pytest.raises(UserError, match=f"pid {process.pid}"):
            run.lock().__enter__()
        process.kill()
        process.wait()
    with run.lock():
        pass


def test_the_next_holder_sweeps_up_behind_a_killed_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, FACTS)
    before = entries(run.path)
    for name in (".run.json.4711.tmp", "..lock.json.12.tmp", ".summary.json.1.tmp"):
        (run.path / name).write_text('{"half')
    kept = run.path / ".mine.tmp"
    kept.write_text("not gptlab's")
    with run.lock():
        pass
    assert entries(run.path) == before | {kept.name}


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"val_bpb": 1.25, "worst": float("nan")})
    before = path.read_bytes()
    assert json.loads(before) == {"val_bpb": 1.25, "worst": "nan"}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plain_file.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_json_atomic(path, {"val_bpb": 1.0})
    assert path.read_bytes() == before
    assert entries(tmp_path) == {"summary.json"}


def test_json_that_cannot_be_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert entries(tmp_path) == set()


def test_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 3, 4, 5, 6, 7)
    assert default_run_path("quickstart", now) == Path("runs/quickstart-20260304-050607")
    assert default_run_path("gpt2/124M", now).name == "gpt2-124M-20260304-050607"
    assert default_run_path("../my recipe.toml", now).name == "my-recipe.toml-20260304-050607"
    assert default_run_path("/", now).name == "run-20260304-050607"
    for expected in ("q-20260304-050607", "q-20260304-050607-2", "q-20260304-050607-3"):
        path = default_run_path("q", now)
        assert path.name == expected
        RunDirectory.create(path, CONFIG, FACTS)


def facts_of_a_run() -> dict[str, object]:
    code = CodeSnapshot("c0ffee", False, "f", {})
    place = Place(torch.device("cpu"), torch.bfloat16, 2, Peak(8.5e11, "measured"))
    return provenance(["train", "quickstart"], code, place, {"data_fingerprint": "d", "world_size": 1})


def test_provenance_tells_what_produced_the_numbers(tmp_path: Path) -> None:
    record = facts_of_a_run()
    assert json.loads(json.dumps(record)) == record
    assert record["argv"] == ["train", "quickstart"]
    assert (record["data_fingerprint"], record["code_fingerprint"]) == ("d", "f")
    assert (record["device_name"], record["dtype"], record["threads"]) == (cpu_model(), "bfloat16", 2)
    assert (record["peak_flops_per_second"], record["peak_source"]) == (8.5e11, "measured")
    assert record["python_version"] == sys.version.split()[0]
    assert str(record["torch_version"]).startswith("2.")
    assert record["world_size"] == 1
    assert datetime.fromisoformat(str(record["start"])).utcoffset() is not None
    assert "status" not in record
    assert RunDirectory.create(tmp_path / "r", CONFIG, record).read_provenance()["cpu"] == cpu_model()


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_git_state_of_the_package_and_of_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    unknown = (None, None)

    def state() -> tuple[str | None, bool | None]:
        code = take_code(package)
        return code.commit, code.dirty

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert state() == unknown
    git(tmp_path, "init", "-q")
    assert state() == unknown  # installed below somebody's repository, not part of it
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as inside a hook of another repository
    assert state() == (commit, False)
    (tmp_path / "notes.txt").touch()  # outside the package: the code is still that of the commit
    assert state() == (commit, False)
    (package / "new.py").touch()
    assert state() == (commit, True)


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms give other reasons")
def test_cpu_model_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "_CPU_INFO", cpuinfo)
    assert cpu_model() == platform.machine()
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_model() == platform.machine()
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654: fast\n")
    assert cpu_model() == "AMD EPYC 9654: fast"
