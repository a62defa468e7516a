"""A run with `data.mask_documents`: its validation, that of `gptlab eval`, and what it records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import arguments, command, lines_of, train

from gptlab.model.gpt import GPT


def test_evaluation_has_the_mask_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(folder, "masked", data__mask_documents=True, steps=4)
    assert json.loads((run / "run.json").read_text())["implementations"]["attention"] == "blocks"
    val_bpb = lines_of(run, "eval")[-1]["val_bpb"]
    assert json.loads(command(["eval", run, "--json"])[1])["val_bpb"] == val_bpb
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "mask_documents", lambda *_: None)
        assert json.loads(command(["eval", run, "--json"])[1])["val_bpb"] != val_bpb


@pytest.mark.parametrize("rows", ["sequential", "random"])
def test_rows_without_documents_are_refused(folder: Path, rows: str) -> None:
    code, _, error = command(
        ["train", *arguments(folder, "refused", {"data.mask_documents": "true", "data.rows": rows})]
    )
    assert code == 2
    assert "only packed rows hold documents" in error
    assert not (folder / "refused").exists()
