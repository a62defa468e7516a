"""A lab's folder: what candidates may read, what only the judge reads, and that both are the text."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_world import new_lab
from tiny_runs import make_config

from gptlab.config.errors import UserError
from gptlab.data.prepare import PreparedData, prepare
from gptlab.lab.experiments import folder as folder_module
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


@pytest.mark.parametrize(
    ("sources", "hidden", "shown"),
    [
        (["stdlib"], [], ["stdlib"]),
        (["notes", "fineweb-edu"], ["notes", "far.txt"], []),
        (["notes/a.txt"], ["notes/a.txt"], []),
        (["notes/*.txt", "missing"], ["notes/a.txt", "notes/b.txt", "notes/link.txt"], []),
        (["python/..", "notes"], ["notes", "far.txt"], ["python/.."]),
    ],
)
def test_where_the_validation_text_comes_from(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], hidden: list[str], shown: list[str]
) -> None:
    """Paths are to be hidden, unless Python would be hidden with them. A corpus by name is in the cache."""
    for name in ("far.txt", "notes/a.txt", "notes/b.txt", "python/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "notes/link.txt").symlink_to(tmp_path / "far.txt")
    (tmp_path / "notes/.venv").mkdir()
    (tmp_path / "notes/.venv/python").symlink_to(sys.executable)  # not read, and not to be hidden
    monkeypatch.setattr("sys.prefix", str(tmp_path / "python"))
    # An editable install has a name there that is no path, and `python -m gptlab` the current folder.
    monkeypatch.chdir(tmp_path / "notes")
    monkeypatch.setattr("sys.path", ["__editable__.gptlab.finder", str(tmp_path / "notes"), *sys.path])
    names = {"stdlib", "fineweb-edu"}
    given = [source if source in names else str(tmp_path / source) for source in sources]
    corpus = {"data.source": given[:1], "data.val_source": given[1:], "data.cache_dir": None}
    found, read = replace(lab, settings=replace(lab.settings, corpus=corpus)).texts()
    assert {*map(Path.resolve, found)} == {(tmp_path / name).resolve() for name in hidden}
    assert read == [given[sources.index(source)] for source in shown]


def test_of_very_many_files_the_folders_are_hidden(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("text")
    corpus = {"data.source": [f"{tmp_path}/*.txt"], "data.val_source": [], "data.cache_dir": None}
    assert replace(lab, settings=replace(lab.settings, corpus=corpus)).texts() == ([tmp_path], [])


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
