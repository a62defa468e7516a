from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_checkpoint import fail_on_damage, flip, holds, same_bits, save_small, small_contents, tree
from safetensors.torch import load_file

from gptlab.config.errors import UserError
from gptlab.runtime.files.tensor_file import (
    DamagedFileError,
    read_bytes,
    read_tensors,
    write_bytes,
    write_tensors,
)
from gptlab.training.checkpoint.format import CheckpointError, DamagedCheckpointError
from gptlab.training.checkpoint.load import (
    load_checkpoint,
    load_newest,
    read_manifest,
    select_checkpoint,
    verify_checkpoint,
)
from gptlab.training.checkpoint.names import list_checkpoints
from gptlab.training.checkpoint.retention import retain
from gptlab.training.checkpoint.write import save_checkpoint

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


# --- what stands on disk, and how it reads back ---------------------------------------------------------------------


def test_a_checkpoint_on_disk(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):  # a run folder is never made again
        save_small(tmp_path / "run" / "checkpoints", 250)
    (tmp_path / "run").mkdir()
    path = save_small(tmp_path / "run" / "checkpoints", 250)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000250"
    assert sorted(tree(path.parent)) == ["step-00000250", *(f"step-00000250/{name}" for name in FILES)]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["step"], manifest["format_version"]) == (250, 2)
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in tree(path).items()
        if name != "manifest.json"
    }
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.path) == (250, path)
    assert holds(path, 250)
    verify_checkpoint(path)


def test_every_file_is_plain_safetensors_or_json(tmp_path: Path) -> None:
    path = save_small(tmp_path, 1)
    assert same_bits(load_file(path / "model.safetensors"), small_contents(1)["model"])
    assert same_bits(load_file(path / "optimizer.safetensors"), small_contents(1)["optimizer"])
    assert json.loads((path / "state.json").read_bytes()) == small_contents(1)["state"]
    assert sorted(entry.name for entry in path.iterdir()) == FILES


def test_state_reads_back_exactly(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "floats": [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, 1e16, 2.0],
        "numbers": [0, -1, 2**100, True, None],
        "text": "ü \n \ud800 \0",
        "": {"deep": [[], {}, [{"er": ""}]]},
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 0, model={}, optimizer={}, state=state)).state
    assert repr(loaded) == repr(state), "repr tells 2.0 from 2, True from 1 and -0.0 from 0.0"


@pytest.mark.parametrize(
    "state",
    [
        {"best": {"loss": float("inf")}},
        {"losses": [1.0, float("nan")]},
        {"a": {1: 2}},
        {"a": (1, 2)},
        {"a": torch.ones(1)},
        {"a": {1, 2}},
    ],
)
def test_state_that_would_not_read_back_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 0, model={}, optimizer={}, state=state)
    assert tree(tmp_path) == {}


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-1"):
        save_small(tmp_path, -1)


# --- damage -----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink, replace_by_link, replace_by_folder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FILES[1:])
def test_any_damaged_file_makes_the_one_before_the_newest(tmp_path: Path, name: str, harm: Any) -> None:
    save_small(tmp_path, 10)
    newer = save_small(tmp_path, 20)
    harm(newer / name)
    before = tree(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=name) as caught:
        load_checkpoint(newer)
    assert str(newer) in str(caught.value)
    with pytest.raises(DamagedCheckpointError, match=name):
        verify_checkpoint(newer)
    lines: list[str] = []
    assert load_newest(tmp_path, lines.append).path == tmp_path / "step-00000010"
    assert len(lines) == 1
    assert str(newer) in lines[0]
    assert "\n" not in lines[0]
    assert load_newest(tmp_path, lines.append).step == 10
    assert tree(tmp_path) == before, "nothing is deleted, nor written"


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_grew_is_damage_before_anything_of_it_is_read(tmp_path: Path, name: str) -> None:
    """Retention looks at sizes alone: a newest checkpoint with a longer file must hold no place."""
    for step in (10, 20, 30):
        save_small(tmp_path, step)
    grown = tmp_path / "step-00000030" / name
    size = grown.stat().st_size
    with grown.open("ab") as file:
        file.write(b" ")
    for check in (read_manifest, verify_checkpoint, load_checkpoint):
        with pytest.raises(DamagedCheckpointError, match=f"{name} has {size + 1:,} bytes, its manifest says {size:,}"):
            check(grown.parent)
    retain(tmp_path, keep_last=1, keep_every_steps=None, best_step=None)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("grown_bytes", [1, 4096])
def test_a_file_that_grows_after_its_size_was_checked(tmp_path: Path, grown_bytes: int) -> None:
    """Also where what was added is a whole number of blocks, and would be read as the file's end."""
    content = b'{"a": 1}'
    record = write_bytes(tmp_path / "state.json", content)
    assert read_bytes(tmp_path / "state.json", record) == content
    with (tmp_path / "state.json").open("ab") as file:
        file.write(b" " * grown_bytes)
    with pytest.raises(DamagedFileError, match=f"has {len(content) + grown_bytes:,} bytes, its manifest says"):
        read_bytes(tmp_path / "state.json", record)
    tensors = {"w": torch.arange(6.0)}
    record = write_tensors(tmp_path / "w.safetensors", tensors)
    with (tmp_path / "w.safetensors").open("ab") as file:
        file.write(bytes(grown_bytes))
    with pytest.raises(DamagedFileError, match="bytes, its manifest says"):
        read_tensors(tmp_path / "w.safetensors", record)
    with pytest.raises(DamagedFileError, match="bytes, its manifest says"):
        read_tensors(tmp_path / "w.safetensors", record, into={"w": torch.empty(6)})


def altered(manifest: dict[str, Any], *keys: str, value: Any) -> dict[str, Any]:
    place = manifest
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return manifest


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), "other"),
        (("format_version",), 3),
        (("format_version",), True),
        (("step",), 11),
        (("step",), -10),
        (("step",), "10"),
        (("step",), True),
        (("files",), []),
        (("files",), {}),
        (("files", "../../secret"), {"bytes": 0, "sha256": ""}),
        (("files", "/etc/hostname"), {"bytes": 0, "sha256": ""}),
        (("files", "more.txt"), {"bytes": 0, "sha256": ""}),
        (("files", "state.json"), None),
        (("files", "state.json", "bytes"), "1"),
        (("files", "state.json", "bytes"), True),
        (("files", "state.json", "bytes"), -1),
        (("files", "state.json", "sha256"), 0),
        (("files", "state.json", "sha256"), "0" * 64),
        (("files", "state.json", "more"), 0),
    ],
)
def test_a_manifest_that_cannot_be_is_damage(tmp_path: Path, keys: tuple[str, ...], value: Any) -> None:
    path = save_small(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(altered(manifest, *keys, value=value)))
    for check in (load_checkpoint, verify_checkpoint):
        with pytest.raises(DamagedCheckpointError):
            check(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 99_000, b" " * 200_000])
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, content: bytes) -> None:
    path = save_small(tmp_path, 10)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load_checkpoint(path)


def test_a_link_is_no_plain_file_even_where_it_leads_to_the_right_content(tmp_path: Path) -> None:
    path = save_small(tmp_path, 10)
    replace_by_link(path / "state.json")
    with pytest.raises(DamagedCheckpointError, match=r"state\.json is not a regular file"):
        load_checkpoint(path)


def test_unknown_files_are_damage_but_not_hidden_ones(tmp_path: Path) -> None:
    path = save_small(tmp_path, 10)
    (path / ".DS_Store").write_bytes(b"a file browser was here")
    load_checkpoint(path)
    (path / "model.pt").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"model\.pt"):
        load_checkpoint(path)


def test_a_linked_folder_and_a_file_in_its_place_are_damage(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    elsewhere = save_small(checkpoints, 10).rename(tmp_path / "step-00000010")
    (checkpoints / "step-00000010").symlink_to(elsewhere, target_is_directory=True)
    (checkpoints / "step-00000011").write_bytes(b"")
    lines: list[str] = []
    with pytest.raises(UserError, match=r"step-00000011.*step-00000010"):
        load_newest(checkpoints, lines.append)
    assert [line.endswith("is not a folder") for line in lines] == [True, True]


def test_one_that_another_machine_lacks_is_not_there(tmp_path: Path) -> None:
    """Rank 0 names it; the disk of this rank has another copy of the run."""
    with pytest.raises(DamagedCheckpointError, match=r"step-00000010 is damaged: is not there$"):
        load_checkpoint(tmp_path / "step-00000010")


def test_a_checkpoint_under_another_steps_name_is_damage(tmp_path: Path) -> None:
    path = save_small(tmp_path, 10).rename(tmp_path / "step-00000020")
    with pytest.raises(DamagedCheckpointError, match="step 10"):
        load_checkpoint(path)
    assert load_checkpoint(path.rename(tmp_path / "my favourite")).step == 10


def test_no_intact_checkpoint_lists_what_is_wrong_with_each(tmp_path: Path) -> None:
    for step, harmed in ((1, "model.safetensors"), (2, "state.json")):
        (save_small(tmp_path, step) / harmed).unlink()
    with pytest.raises(UserError) as caught:
        load_newest(tmp_path, lambda line: None)
    text = str(caught.value)
    assert "step-00000001: has no model.safetensors" in text
    assert "step-00000002: has no state.json" in text
    assert "\n" not in text


@pytest.mark.parametrize("folder", [".", "not there"])
def test_no_checkpoint_at_all(tmp_path: Path, folder: str) -> None:
    assert list_checkpoints(tmp_path / folder) == []
    with pytest.raises(UserError, match="none has been saved"):
        load_newest(tmp_path / folder, fail_on_damage)
    with pytest.raises(UserError, match="none up to step 20 is there"):
        load_newest(tmp_path / folder, fail_on_damage, up_to=20)


# --- which one --------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 1000):
        save_small(tmp_path, step)
    for name in (".step-00000007.tmp-1", ".step-00000008.removed-1", "step-7", "step-0000000000009", "steps", "step-x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00001000", "step-100000000"]
    assert load_newest(tmp_path, fail_on_damage).path.name == "step-100000000"


def test_selection(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_small(tmp_path, step)

    def selected(which: str, best_step: int | None = None) -> str:
        return select_checkpoint(tmp_path, which, best_step=best_step).name

    assert selected("best", best_step=20) == "step-00000020"
    assert selected("10") == "step-00000010"
    with pytest.raises(UserError, match="no validation"):
        selected("best")
    with pytest.raises(UserError, match="steps there: 10, 20, 30"):
        selected("25")
    for nonsense in ("", "-10", "newest", "²", "1e1"):
        with pytest.raises(UserError, match="latest, best"):
            selected(nonsense)
    flip(tmp_path / "step-00000030" / "state.json")
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(select_checkpoint(tmp_path, "30"))
