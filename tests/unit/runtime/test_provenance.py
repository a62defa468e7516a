"""A run's folder holds what is needed to repeat it: the code byte for byte, the environment, the GPU's own report."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import train, write_corpus

import gptlab
from gptlab.app.api import train as train_run
from gptlab.runtime.records import provenance as provenance_module
from gptlab.runtime.records.provenance import (
    PATCH_NAME,
    ZIP_NAME,
    CodeSnapshot,
    Evidence,
    begin_evidence,
    environment_text,
    gpu_report,
    take_code,
    take_evidence,
)
from gptlab.runtime.records.run_directory import RunDirectory

PACKAGE = Path(gptlab.__file__).parent


def git(folder: Path, *arguments: str, config: tuple[str, ...] = ()) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org", *config]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def tree(package: Path) -> dict[str, tuple[bytes, bool]]:
    """{path: (contents, may be executed)} of everything but compiled files."""
    return {
        path.relative_to(package).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Some of this package in a repository of its own, below a folder as somebody may have it."""
    top = tmp_path / "somebody"
    others = [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name not in ("cli", "config", "data")]
    shutil.copytree(PACKAGE, top / "code" / "gptlab", ignore=shutil.ignore_patterns("__pycache__", *others))
    (top / ".gitignore").write_text("__pycache__/\n")
    (top / "code" / "gptlab" / "table.bin").write_bytes(bytes(range(256)) * 4)
    (top / "README.md").write_text("the whole house\n")
    git(tmp_path, "init", "-q", str(top))
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "one")
    return top


def edit(package: Path) -> None:
    """A change of every kind."""
    (package / "config" / "run.py").write_text("print('other')  \n\tno newline at the end", newline="\n")
    (package / "config" / "new file é.py").write_bytes(b"windows\r\nlines\r\n")
    (package / "empty.py").touch()
    (package / "new" / "deep").mkdir(parents=True)
    (package / "new" / "deep" / "weights.bin").write_bytes(b"\0\x01\xff" * 100)
    (package / "table.bin").write_bytes(bytes(reversed(range(256))) * 4)
    (package / "cli" / "main.py").rename(package / "cli" / "principal.py")
    (package / "data" / "rows.py").unlink()
    (package / "__main__.py").chmod(0o755)
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"compiled")


class TestCode:
    def test_a_clean_tree_is_its_commit(self, repository: Path) -> None:
        (repository / "README.md").write_text("words about it\n")  # outside the package
        code = take_code(repository / "code" / "gptlab")
        assert (code.commit, code.dirty, dict(code.files)) == (git(repository, "rev-parse", "HEAD"), False, {})

    @pytest.mark.parametrize(
        "config",
        [{}, {"diff.noprefix": "true", "diff.relative": "true", "color.ui": "always", "diff.external": "false",
              "diff.renames": "copies", "core.quotePath": "false", "diff.context": "0"}],
        ids=["plain", "configured"],
    )  # fmt: skip
    def test_commit_and_patch_give_exactly_what_ran(
        self, repository: Path, tmp_path: Path, config: dict[str, str]
    ) -> None:
        package = repository / "code" / "gptlab"
        edit(package)
        git(repository, "add", str(package / "empty.py"))  # some of it staged
        for name, value in config.items():
            git(repository, "config", name, value)
        index, status = (repository / ".git" / "index").read_bytes(), git(repository, "status", "--porcelain")
        code = take_code(package)
        assert (repository / ".git" / "index").read_bytes() == index
        assert git(repository, "status", "--porcelain") == status
        assert (code.dirty, set(code.files)) == (True, {PATCH_NAME})

        (tmp_path / PATCH_NAME).write_bytes(code.files[PATCH_NAME])
        assert code.commit is not None
        git(tmp_path, "clone", "-q", "--no-checkout", str(repository), "clone")
        git(tmp_path / "clone", "checkout", "-q", code.commit)
        git(tmp_path / "clone", "apply", str(tmp_path / PATCH_NAME))
        assert tree(tmp_path / "clone" / "code" / "gptlab") == tree(package)
        assert take_code(tmp_path / "clone" / "code" / "gptlab").fingerprint == code.fingerprint

    @pytest.mark.parametrize(
        "config", [{}, {"status.showUntrackedFiles": "no", "core.splitIndex": "true", "core.excludesFile": "mine"}],
        ids=["plain", "configured"],
    )  # fmt: skip
    def test_what_git_passes_over_is_part_of_what_ran(
        self, repository: Path, tmp_path: Path, config: dict[str, str]
    ) -> None:
        """Ignored files, files that the user's index calls unchanged, and one that it has no more."""
        package = repository / "code" / "gptlab"
        (repository / "mine").write_text("*.new\n")
        (repository / ".git" / "info" / "exclude").write_text("local_*.py\nbuild/\n")
        for name, value in config.items():
            git(repository, "config", name, value)
        git(repository, "update-index", "--assume-unchanged", "code/gptlab/config/run.py")
        git(repository, "update-index", "--skip-worktree", "code/gptlab/config/model.py")
        git(repository, "rm", "-q", "--cached", "code/gptlab/cli/main.py")
        assert take_code(package).dirty is False
        for name in ("local_x.py", "build/x.py", "data/x.new", "[a]*.py", "config/run.py", "config/model.py"):
            (package / name).parent.mkdir(exist_ok=True)
            (package / name).write_text("x = 1\n")
        code = take_code(package)
        assert (code.dirty, set(code.files)) == (True, {PATCH_NAME})
        (tmp_path / PATCH_NAME).write_bytes(code.files[PATCH_NAME])
        git(tmp_path, "clone", "-q", str(repository), "clone")
        git(tmp_path / "clone", "apply", str(tmp_path / PATCH_NAME))
        assert tree(tmp_path / "clone" / "code" / "gptlab") == tree(package)

    def test_with_a_repository_inside_the_package_itself_is_kept(self, repository: Path, tmp_path: Path) -> None:
        package = repository / "code" / "gptlab"
        git(tmp_path, "init", "-q", str(package / "inner"))
        (package / "inner" / "x.py").write_text("x = 1\n")
        code = take_code(package)
        assert (code.commit, code.dirty) == (git(repository, "rev-parse", "HEAD"), True)
        assert "gptlab/inner/x.py" in zipfile.ZipFile(io.BytesIO(code.files[ZIP_NAME])).namelist()

    def test_from_a_linked_worktree(self, repository: Path, tmp_path: Path) -> None:
        git(repository, "worktree", "add", "-q", str(tmp_path / "linked"))
        package = tmp_path / "linked" / "code" / "gptlab"
        (package / "new.py").write_text("x = 1\n")
        assert b"+x = 1\n" in take_code(package).files[PATCH_NAME]

    def test_without_a_repository_the_package_itself_is_kept(self, tmp_path: Path) -> None:
        shutil.copytree(PACKAGE, tmp_path / "gptlab", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "gptlab" / "__pycache__").mkdir()
        (tmp_path / "gptlab" / "__pycache__" / "x.pyc").touch()
        code = take_code(tmp_path / "gptlab")
        assert (code.commit, code.dirty, set(code.files)) == (None, None, {ZIP_NAME})
        os.utime(tmp_path / "gptlab" / "__init__.py", (0, 0))
        assert take_code(tmp_path / "gptlab") == code  # nothing but names and contents is in the archive
        zipfile.ZipFile(io.BytesIO(code.files[ZIP_NAME])).extractall(tmp_path / "again")
        shutil.rmtree(tmp_path / "gptlab" / "__pycache__")
        assert tree(tmp_path / "again" / "gptlab") == tree(tmp_path / "gptlab")
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "again")}
        done = subprocess.run(
            [sys.executable, "-c", "import gptlab; print(gptlab.__file__)"],
            env=environment, cwd=tmp_path / "again", capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert Path(done.stdout.strip()).parent == tmp_path / "again" / "gptlab"

    def test_without_git_it_is_kept_too(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        code = take_code(PACKAGE)
        assert (code.commit, set(code.files)) == (None, {ZIP_NAME})

    def test_a_repository_without_commits_has_no_patch_to_offer(self, tmp_path: Path) -> None:
        (tmp_path / "gptlab").mkdir()
        (tmp_path / "gptlab" / "__init__.py").touch()
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", "-A")
        code = take_code(tmp_path / "gptlab")
        assert (code.commit, code.dirty, set(code.files)) == (None, None, {ZIP_NAME})

    def test_the_fingerprint_is_of_names_and_contents(self, tmp_path: Path) -> None:
        def of(**files: str) -> str:
            package = tmp_path / "p"
            shutil.rmtree(package, ignore_errors=True)
            package.mkdir()
            for name, text in files.items():
                (package / f"{name}.py").write_text(text)
            (package / ".swap.py.swp").write_text(str(len(files)))
            return take_code(package).fingerprint

        assert of(a="x", b="y") == of(b="y", a="x")
        assert len({of(a="x", b="y"), of(a="xy", b=""), of(a="y", b="x"), of(a="x")}) == 4


class TestEnvironment:
    def test_lists_what_is_installed_as_pip_reads_it(self) -> None:
        lines = environment_text(os.environ).splitlines()
        required = [
            line for line in lines if not line.startswith(("#", "--extra-index-url https://download.pytorch.org/"))
        ]
        assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in required)
        assert required == sorted(required, key=lambda line: line.partition("==")[0])
        assert f"torch=={metadata.version('torch')}" in required  # of PyPI's builds, without +cu130
        assert not [line for line in required if line.startswith("gptlab==")]  # no index has it
        assert lines[0].startswith("# gptlab ")
        assert lines[1].startswith(f"# Python {sys.version.split()[0]}")

    @pytest.mark.parametrize(
        ("build", "index"), [("+cpu", "cpu"), ("+cu128", "cu128"), ("", None), ("+git1a2b3c", None)]
    )
    def test_names_the_index_of_a_build_that_pypi_lacks(
        self, build: str, index: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(provenance_module, "installed_distributions", lambda: {"torch": f"2.13.0{build}"})
        lines = [line for line in environment_text({}).splitlines() if not line.startswith("#")]
        given = [] if index is None else [f"--extra-index-url https://download.pytorch.org/whl/{index}"]
        assert lines == [*given, f"torch==2.13.0{build}"]

    def test_variables_that_matter_and_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        monkeypatch.setenv("GPTLAB_SOMETHING", "two\nlines")
        monkeypatch.setenv("GPTLAB_HUB_TOKEN", "hunter2")
        monkeypatch.setenv("CUDA_API_KEY", "hunter2")
        monkeypatch.setenv("EDITOR", "hunter2")
        lines = environment_text(os.environ).splitlines()
        assert {"# OMP_NUM_THREADS=3", "# CUDA_VISIBLE_DEVICES=1,0", "# GPTLAB_SOMETHING=two lines"} <= set(lines)
        assert "hunter2" not in environment_text(os.environ)

    def test_a_variable_that_is_no_utf_8(self) -> None:
        text = take_evidence({"GPTLAB_CACHE": os.fsdecode(b"/x/\xff")}).files["environment.txt"].decode()
        assert "# GPTLAB_CACHE=/x/\\udcff\n" in text

    def test_nobody_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(provenance_module.platform, "node", lambda: "secretbox")
        monkeypatch.setattr(provenance_module.getpass, "getuser", lambda: "ada")
        monkeypatch.setattr(provenance_module.Path, "home", lambda: Path("/home/ada"))
        monkeypatch.setenv("GPTLAB_CACHE", "/home/ada/cache:/scratch/ada/x:/mnt/secretbox/adamant:/home/adam")
        text = environment_text(os.environ)
        assert f"# GPTLAB_CACHE=~/cache{os.pathsep}/scratch/USER/x".replace(os.pathsep, ":") in text
        assert "/mnt/HOST/adamant:/home/adam\n" in text
        assert "secretbox" not in text

    def test_a_user_without_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nobody() -> str:
            raise KeyError("getpwuid(): uid not found: 4711")

        monkeypatch.setattr(provenance_module.getpass, "getuser", nobody)
        monkeypatch.setenv("GPTLAB_CACHE", "/x")
        assert "# GPTLAB_CACHE=/x\n" in environment_text(os.environ)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that prints, for what no machine of these tests has."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI 570.1  CUDA Version: 12.8'\necho 'H200 in secretbox'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance_module.platform, "node", lambda: "secretbox")
    return tool


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for the tool")
class TestGpuReport:
    def test_is_what_the_tool_prints_without_the_hosts_name(self, nvidia_smi: Path) -> None:
        assert gpu_report() == "NVIDIA-SMI 570.1  CUDA Version: 12.8\nH200 in HOST\n"

    def test_a_tool_that_fails_reports_nothing(self, nvidia_smi: Path) -> None:
        nvidia_smi.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
        assert gpu_report() is None


class TestEvidence:
    def test_is_taken_beside_other_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        evidence = Evidence(CodeSnapshot(None, None, "f", {}), {})
        go_on = threading.Event()

        def slow(variables: object) -> Evidence:
            assert go_on.wait(60)
            return evidence

        monkeypatch.setattr(provenance_module, "take_evidence", slow)
        taker = begin_evidence()
        go_on.set()  # nobody would, if the line above waited
        assert taker.result() is evidence

    def test_what_goes_wrong_is_not_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(variables: object) -> Evidence:
            raise OSError("a folder that may not be read")

        monkeypatch.setattr(provenance_module, "take_evidence", broken)
        with pytest.raises(OSError, match="may not be read"):
            begin_evidence().result()

    def test_asks_few_programs_and_waits_for_none_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three questions to git, three more where there is something to patch, and two tools of GPUs."""
        limits: list[float | None] = []
        run = subprocess.run

        def counting(*args: Any, **options: Any) -> Any:
            limits.append(options.get("timeout"))
            return run(*args, **options)

        monkeypatch.setattr(subprocess, "run", counting)
        monkeypatch.setattr(provenance_module, "take_code", take_code)  # conftest.py lets it look once for all runs
        take_evidence(os.environ)
        assert 0 < len(limits) <= 8
        assert None not in limits


class TestRun:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_corpus(tmp_path / "corpus")
        return tmp_path

    def test_keeps_code_environment_and_report(
        self, folder: Path, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = CodeSnapshot("c0ffee0", True, "f1", {PATCH_NAME: b"diff --git\n\xff"})
        monkeypatch.setattr(provenance_module, "take_code", lambda package: code)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        before = environment_text(os.environ)
        run = RunDirectory.open(train(folder, "r", steps=1))
        assert (run.code_path / PATCH_NAME).read_bytes() == b"diff --git\n\xff"
        assert run.environment_path.read_text() == before
        assert (run.path / "gpu.txt").read_text().endswith("H200 in HOST\n")
        facts = run.read_provenance()
        assert [facts[name] for name in ("git_commit", "git_dirty", "code_fingerprint")] == ["c0ffee0", True, "f1"]
        assert (facts["from"], facts["resumes"]) == (None, [])
        assert (facts["torch_version"], facts["cuda_version"]) == (torch.__version__, "12.8")

    def test_a_resumed_run_keeps_the_code_of_both(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def running(fingerprint: str) -> None:
            code = CodeSnapshot("c0ffee0", True, fingerprint, {PATCH_NAME: fingerprint.encode()})
            monkeypatch.setattr(provenance_module, "take_code", lambda package: code)

        running("first")
        run = RunDirectory.open(train(folder, "r", steps=2))
        for fingerprint in ("first", "second"):
            run.summary_path.unlink()  # else it is finished, and nothing goes on
            running(fingerprint)
            assert train_run(resume=run.path).exit_code == 0
        kept = {path.relative_to(run.code_path).as_posix(): path.read_text() for path in run.code_path.rglob("*.patch")}
        assert kept == {PATCH_NAME: "first", f"resume-2/{PATCH_NAME}": "second"}
        resumes = json.loads(run.provenance_path.read_text())["resumes"]
        assert [resume["code_fingerprint"] for resume in resumes] == ["first", "second"]
        log = run.log_path.read_text()
        assert log.count("warning: the code is not that of") == 1
        assert f"git checkout c0ffee0 && git apply {(run.code_path / PATCH_NAME).resolve()}" in log

    def test_what_a_killed_start_left_is_not_the_next_ones(self, tmp_path: Path) -> None:
        run = RunDirectory(tmp_path / "r")
        run.write_files({"code/changes.patch": b"old", "gpu.txt": b"old", "environment.txt": b"old"})
        RunDirectory.create(run.path, {}, {}, contents=lambda run: run.write_files({"environment.txt": b"new"}))
        assert not run.code_path.exists()
        assert not (run.path / "gpu.txt").exists()
        assert run.environment_path.read_text() == "new"
