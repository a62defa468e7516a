"""The report that a run writes at its end, in another process."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import at_line, make_config, write_corpus
from written_runs import write_run

import gptlab
from gptlab.app.run import run_session
from gptlab.report.markdown import run_text
from gptlab.report.run_facts import read_facts
from gptlab.runtime.processes.distributed import Group
from gptlab.runtime.records.console import Console
from gptlab.training.faults import TrainingFailed

PACKAGE = Path(gptlab.__file__).parent
FIELDS = {"log__report": True, "steps": 4, "eval__every_steps": 2, "sample__every_steps": 4}


def test_a_run_writes_its_report_and_shows_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus")
    for name in [name for name in sys.modules if name.startswith("gptlab.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gptlab.report", None)  # an import of it by this process fails
    assert gptlab.train(make_config(tmp_path, "run", **FIELDS)).exit_code == 0
    page, text = (tmp_path / "run" / name for name in ("report.html", "report.md"))
    assert "<title>run" in page.read_text(encoding="utf-8")
    assert "# `run`" in text.read_text(encoding="utf-8")
    assert "| trained on " in text.read_text(encoding="utf-8"), "run.json counts the tokens of the corpus"
    shown = capsys.readouterr().out
    curve, _, rest = shown.partition("validation bits per byte\n")[2].partition("report: ")
    assert "4 steps" in curve
    assert rest.startswith(str(page))
    assert rest.rpartition("---\n")[2].startswith("val_bpb:"), "the closing block stays the last"


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_a_run_that_ends_early_leaves_its_report_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It does not wait for it. `leave_report` is called once all that the report shows is written."""
    write_corpus(tmp_path / "corpus")
    started: list[list[str]] = []

    class Process:
        def __init__(self, argv: list[str], **_: object) -> None:
            started.append(argv)
            assert read_facts(tmp_path / "run").status == {"stopped": "preempted", "failed": "failed"}[end]

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(run_session, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL))
    if end == "stopped":
        with at_line("train", 2, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            result = gptlab.train(make_config(tmp_path, "run", **FIELDS))
        assert result.exit_code == 75
    else:
        with pytest.raises(TrainingFailed):
            gptlab.train(make_config(tmp_path, "run", runtime__max_loss=0.1, **FIELDS))
    (argv,) = started
    assert argv[-2:] == ["report", str(tmp_path / "run")]
    text = run_text(read_facts(tmp_path / "run"))
    assert {"stopped": "was stopped after step 2", "failed": "failed at step 1: "}[end] in text
    started.clear()
    run_session.leave_report(tmp_path / "run", make_config(tmp_path, "run"), Group())
    assert started == [], "log.report = false leaves it out"


def test_the_process_that_is_left_writes_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [4.0, 3.0], status="preempted")
    run_session.leave_report(run, make_config(tmp_path, "run", log__report=True), Group())
    for _ in range(600):
        if (run / "report.md").exists():
            break
        time.sleep(0.05)
    assert "was stopped after step 10" in (run / "report.md").read_text(encoding="utf-8")


def test_the_curve_is_no_wider_than_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((40, 24)))
    run_session.write_report(write_run(tmp_path / "run", [4.0, 3.0, 2.5]), Console())
    title, *curve, _ = capsys.readouterr().out.splitlines()
    assert (title, max(map(len, curve))) == ("validation bits per byte", 40)


def test_without_the_package_that_reports_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = tmp_path / "tree" / "gptlab"
    without.mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name not in ("report", "__pycache__"):
            (without / entry.name).symlink_to(entry)
    # In its place something that cannot be imported: the finder of an editable installation would find the real one.
    (without / "report.py").write_text("raise ModuleNotFoundError(\"No module named 'gptlab.report'\")\n")
    monkeypatch.setattr(gptlab, "__file__", str(without / "__init__.py"))
    run_session.write_report(tmp_path / "run", Console())
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: no report was written (")
    assert "No module named 'gptlab.report'" in warning


def test_a_process_that_cannot_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    run_session.write_report(tmp_path / "run", Console())
    assert "warning: no report was written (" in capsys.readouterr().out


def test_nothing_that_trains_imports_it() -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "report") and "gptlab.report" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gptlab.report")
    }
    assert {name for name in importers if not name.startswith("cli/")} <= {"app/run/attempt.py"}
    assert "cli/train.py" not in importers
