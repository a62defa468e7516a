"""`--resume RUN --resume-from-step N`: the same steps once more, and nothing of what came after N is lost."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import command, differences, outcome, train, write_corpus

from gptlab.training.checkpoint.load import verify_checkpoint
from gptlab.training.checkpoint.names import list_checkpoints


def test_it_is_the_same_run_again_and_what_was_there_is_set_aside(folder: Path) -> None:
    run = train(folder, "run", checkpoint__keep_last=9)  # 12 steps, saved at 4, 8 and 12
    before = outcome(run)
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "log.txt", "summary.json", "run.json")}
    code, out, err = command(["train", "--resume", run, "--resume-from-step", "4"])
    assert (code, err) == (0, "")
    (said,) = [line for line in out.splitlines() if "back to step 4" in line]
    assert said.startswith("warning: ")
    assert "later steps (8, 12)" in said
    assert said.endswith(f"are in {run / 'set-aside-1'}")
    assert differences(before, outcome(run)) == []
    aside = run / "set-aside-1"
    assert {name: (aside / name).read_bytes() for name in kept} == kept
    assert [path.name for path in list_checkpoints(aside / "checkpoints")] == ["step-00000008", "step-00000012"]
    for path in list_checkpoints(aside / "checkpoints"):
        verify_checkpoint(path)
    assert command(["train", "--resume", run, "--resume-from-step", "8"])[0] == 0
    assert [path.name for path in list_checkpoints(run / "set-aside-2" / "checkpoints")] == ["step-00000012"]
    assert differences(before, outcome(run)) == []


def test_a_refusal_changes_nothing(tmp_path: Path) -> None:
    """The data is found to be another one only after the checkpoint was loaded."""
    write_corpus(tmp_path / "corpus")
    run = train(tmp_path, "run", checkpoint__keep_last=9, steps=8)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    write_corpus(tmp_path / "more", documents=21).joinpath("documents.jsonl").replace(
        tmp_path / "corpus/documents.jsonl"
    )
    code, out, err = command(["train", "--resume", run, "--resume-from-step", "4"])
    assert (code, "back to step" in out) == (2, False)
    assert f"the data is not what {run} was trained on" in err
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_a_step_that_is_not_there_is_refused_and_nothing_moves(folder: Path) -> None:
    run = train(folder, "other", steps=8)
    there = sorted(path.name for path in run.iterdir())
    code, _, err = command(["train", "--resume", run, "--resume-from-step", "5"])
    assert code == 2
    assert "no checkpoint of step 5" in err
    assert "(steps there: 4, 8)" in err
    assert sorted(path.name for path in run.iterdir()) == there
    code, _, err = command(["train", "quickstart", "--resume-from-step", "5"])
    assert (code, err) == (2, "gptlab: error: --resume-from-step needs --resume RUN, the run to continue\n")
