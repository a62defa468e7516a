"""A lab's folder: what candidates may read, what only the judge reads, and that both are the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_world import new_lab
from tiny_runs import make_config

from gptlab.config.errors import UserError
from gptlab.data.prepare import PreparedData, prepare
from gptlab.lab.experiments.folder import Lab, has_stand_in, require_validation_text
from gptlab.lab.run_list import list_runs


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return new_lab(tmp_path_factory.mktemp("labs"))


def text_of_run(lab: Lab) -> PreparedData:
    """The text as a run without a lab has it."""
    config = make_config(lab.path.parent, "never")
    return prepare(config.data, config.tokenizer)


def test_candidates_train_on_the_training_text(lab: Lab, tmp_path: Path) -> None:
    """The rows of a run in the lab are those of a run without one."""
    config = lab.run_config(seed=1, vocab_size=lab.tokenizer().vocab_size)
    here = prepare(replace(config.data, cache_dir=str(tmp_path)), config.tokenizer)
    whole = text_of_run(lab)
    assert np.array_equal(here.train.read(0, here.train.n_tokens), whole.train.read(0, whole.train.n_tokens))
    assert here.train.document_starts.tolist() == whole.train.document_starts.tolist()
    assert here.train.n_bytes == whole.train.n_bytes


def test_the_two_slices_are_the_validation_text(lab: Lab) -> None:
    whole, slices = text_of_run(lab).val, [lab.slice("validation"), lab.slice("promotion")]
    tokens = np.concatenate([one.read(0, one.n_tokens) for one in slices])
    assert np.array_equal(tokens, whole.read(0, whole.n_tokens))
    assert sum(one.n_documents for one in slices) == whole.n_documents  # none is cut
    hashes = np.concatenate([one.content_hashes for one in slices])
    assert np.array_equal(hashes, whole.content_hashes)
    assert sum(one.n_bytes for one in slices) == whole.n_bytes


def test_no_token_of_validation_is_where_candidates_read(lab: Lab) -> None:
    """In the corpus of words, no window of 20 validation tokens occurs in what candidates may read."""
    validation = lab.slice("validation")
    tokens = validation.read(0, validation.n_tokens).astype("<u2").tobytes()
    readable = b"".join(path.read_bytes() for path in (lab.path / "data" / "tokens").iterdir())
    windows = [tokens[start : start + 40] for start in range(0, len(tokens) - 40, 40)]
    assert windows
    found = [window for window in windows if window in readable]
    assert len(found) <= 0.05 * len(windows)  # words repeat: a window in twenty may be chance


def test_other_places_of_the_users_configuration_are_not_the_labs(lab: Lab) -> None:
    """A cache folder of the user's cannot be written by a candidate."""
    values = lab.baseline_config()
    assert values["data.cache_dir"] is None
    assert values["eval.at_end"] is False
    assert lab.run_config(1, 257).data.source == (str(lab.path / "data" / "tokens"),)


def test_a_folder_that_is_not_free_is_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match="is not empty"):
        new_lab(lab.path.parent)


def test_no_lab(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no lab in"):
        Lab.open(tmp_path)
    (tmp_path / "lab.json").write_text('{"name": "x", "colour": "red"}')
    with pytest.raises(UserError, match=r"lab\.json cannot be used"):
        Lab.open(tmp_path)


def test_a_corpus_whose_validation_text_is_training_text(lab: Lab, tmp_path: Path) -> None:
    config = lab.run_config(1, 257)
    assert has_stand_in(config.data)
    assert not has_stand_in(replace(config.data, source=("stdlib", str(tmp_path / "corpus"))))
    with pytest.raises(UserError, match="is a lab's training text"):
        require_validation_text(config.data)
    require_validation_text(replace(config.data, val_source=(str(tmp_path / "own"),)))


def test_its_baseline_is_a_configuration_and_no_run(lab: Lab) -> None:
    """Nothing that lists or deletes runs may take it for one."""
    assert [*list_runs([lab.path])] == []
