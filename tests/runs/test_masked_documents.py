"""A run with `data.mask_documents`: its validation, that of `gptlab eval`, what it records, and how it is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import arguments, command, lines_of, make_config, train

from gptlab.bench.timing import made_up_run
from gptlab.model.gpt import GPT
from gptlab.runtime.hardware.place import place_of


def test_evaluation_has_the_mask_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(folder, "masked", data__mask_documents=True, steps=4)
    assert json.loads((run / "run.json").read_text())["implementations"]["attention"] == "blocks"
    val_bpb = lines_of(run, "eval")[-1]["val_bpb"]
    assert json.loads(command(["eval", run, "--json"])[1])["val_bpb"] == val_bpb
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "mask_documents", lambda *_: None)
        assert json.loads(command(["eval", run, "--json"])[1])["val_bpb"] != val_bpb


def test_timed_steps_have_the_mask(folder: Path) -> None:
    """On made-up tokens, in documents of about 1,700."""
    sizes = {"model__seq_len": 128, "batch__micro_sequences": 32, "batch__total_tokens": 32 * 128}
    config = make_config(folder, "timed", **sizes, data__mask_documents=True, model__vocab_size=300)
    state, _ = made_up_run(config, place_of(config), print)
    mask = state.model.document_mask
    assert mask is not None
    assert mask.capacity is not None
    mask.capacity.documents = 1
    with state.loader:
        rows = next(state.loader).inputs[0]
    begins = (rows == 299) | (torch.arange(128) == 0)  # at BOS, the last entry
    assert begins.sum() > 32
    assert torch.equal(mask.bounds(rows) == torch.arange(128), begins)
    assert mask.capacity.documents >= begins.sum()  # counted as the rows were read


@pytest.mark.parametrize("rows", ["sequential", "random"])
def test_rows_without_documents_are_refused(folder: Path, rows: str) -> None:
    code, _, error = command(
        ["train", *arguments(folder, "refused", {"data.mask_documents": "true", "data.rows": rows})]
    )
    assert code == 2
    assert "only packed rows hold documents" in error
    assert not (folder / "refused").exists()
