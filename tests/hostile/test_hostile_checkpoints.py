"""Untrusted checkpoints and run folders: refused by name, in one line, at once; nothing of theirs is run, and
nothing outside of them is read or written."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import ANY_FILE, ANY_JSON, deep, endless, hole, less_deep, pipe, posix_only, refuse
from oracle_checkpoint import holds, save_small, tree
from tiny_runs import command, make_config, train, write_corpus

from gptlab.app.run.repeat import what_differs
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.data.tokenizer.tokenizer import ByteTokenizer
from gptlab.model.gpt import build_model
from gptlab.runtime.files.cache import keep_compiled
from gptlab.runtime.files.plain_file import read_json_object, write_json_atomic
from gptlab.runtime.records.metrics import AppendFile, read_metrics
from gptlab.runtime.records.provenance import PATCH_NAME, ZIP_NAME
from gptlab.runtime.records.run_directory import RunDirectory
from gptlab.training.checkpoint.load import load_checkpoint, load_newest, verify_checkpoint
from gptlab.training.checkpoint.retention import discard_after, retain
from gptlab.training.checkpoint.write import save_checkpoint

pytestmark = [posix_only, pytest.mark.timeout(60)]  # a reader that waits for a pipe would wait forever

PARTS = ("model.safetensors", "optimizer.safetensors", "state.json")
Harm = Callable[[Path], None]


def reseal(checkpoint: Path) -> None:
    """Make the manifest say what the files are, as whoever altered them on purpose would: in version 1, which has no
    index of the tensors, so that nothing but the file itself can show what it is."""
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest = {"format": manifest["format"], "format_version": 1, "step": manifest["step"], "files": manifest["files"]}
    for name, record in manifest["files"].items():
        size = (checkpoint / name).stat().st_size
        content = (checkpoint / name).read_bytes() if size < 1 << 30 else b""
        record |= {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def header(value: object, data_bytes: int = 0) -> Harm:
    """A safetensors file with this header."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()

    def write(path: Path) -> None:
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))

    return write


def tensor(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def altered_index(alter: Callable[[dict[str, Any]], dict[str, Any]]) -> Harm:
    """The manifest of version 2 with the index of weights that `alter` makes of one entry of it."""

    def write(path: Path) -> None:
        manifest = json.loads(path.read_bytes())
        manifest["model"] = alter(next(iter(manifest["model"].values())))
        path.write_text(json.dumps(manifest))

    return write


HARMS: dict[str, tuple[str, Harm, str]] = {
    "a pipe": ("model.safetensors", pipe, "not a regular file"),
    "a pipe for the manifest": ("manifest.json", pipe, "not a regular file"),
    "a device": ("state.json", endless, "not a regular file"),
    "a hole of a terabyte": ("model.safetensors", hole, "bytes of memory"),
    "a hole for the state": ("state.json", hole, "too many"),
    "a hole for the manifest": ("manifest.json", hole, "manifest.json has 1,099,511,627,776 bytes"),
    "a manifest of many tensors": (
        "manifest.json",
        altered_index(lambda entry: {f"{i}": entry for i in range(12_000)}), "manifest.json",
    ),
    "a tensor of many pieces": (
        "manifest.json",
        altered_index(lambda entry: {"a": entry | {"pieces": [["model.safetensors", 0, 0]] * 35_000}}), "empty",
    ),
    "an index of an absurd shape": (
        "manifest.json",
        altered_index(lambda entry: {"a": entry | {"shape": [2**62, 2**62]}}), "manifest.json",
    ),
    "a manifest of more": ("manifest.json", lambda path: path.write_bytes(b" " * 9_000_000), "has 9,000,000 bytes"),
    "a deep state": ("state.json", deep, "nested too deep"),
    "a state deep enough for recursion": ("state.json", less_deep, "nested too deep"),
    "a header of 2^62 bytes": ("model.safetensors", lambda path: path.write_bytes(b"\0" * 7 + b"\x40"), "cannot be"),
    "a header of 9 MB": ("optimizer.safetensors", header(b" " * 9_000_000), "cannot be"),
    "a deep header": ("optimizer.safetensors", header(b"[" * 1_000_000), "nested too deep"),
    "data of another tensor": (
        "model.safetensors", header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, 12), "begins at byte 4",
    ),
    "an absurd shape": ("model.safetensors", header({"a": tensor([2**40, 2**40], 0, 8)}, 8), "shape"),
    "a shape of more than there is": ("model.safetensors", header({"a": tensor([2**38], 0, 2**40)}, 8), "cover"),
    "12,000 empty tensors": (
        "model.safetensors", header({f"{i}": tensor([0], 0, 0) for i in range(12_000)}, 8), "cover",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMS)
def test_a_hostile_file_in_a_checkpoint(tmp_path: Path, kind: str) -> None:
    name, harm, says = HARMS[kind]
    save_small(tmp_path, 10)
    hostile = save_small(tmp_path, 20)
    harm(hostile / name)
    if name != "manifest.json" and (hostile / name).is_file() and not (hostile / name).is_symlink():
        reseal(hostile)
    for check in (load_checkpoint, verify_checkpoint):
        # Traced once: that takes ten times as long, and both read the same files.
        line = refuse(lambda check=check: check(hostile), says, trace=check is load_checkpoint)
        assert str(hostile) in line
        assert name in line
    warnings: list[str] = []
    newest = load_newest(tmp_path, warnings.append)
    assert (newest.path.name, newest.step) == ("step-00000010", 10)
    assert [str(hostile) in line for line in warnings] == [True]


def test_a_header_that_claims_a_terabyte_takes_no_memory(tmp_path: Path) -> None:
    """Consistent in everything but that nothing of it is there: a hole behind a header that says so."""
    path = save_small(tmp_path, 10)
    header({"a": tensor([2**38], 0, 2**40)})(path / "model.safetensors")
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size + 2**40)
    reseal(path)
    refuse(lambda: load_checkpoint(path), "bytes of memory")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("source", [10, 20], ids=["older into newer", "newer into older"])
def test_parts_of_two_checkpoints_are_never_one(tmp_path: Path, name: str, source: int) -> None:
    """Each part is whole, and the others are, too; only the manifest knows that they are not of one save."""
    paths = {step: save_small(tmp_path, step) for step in (10, 20)}
    target = 30 - source
    shutil.copy(paths[source] / name, paths[target] / name)
    for check in (load_checkpoint, verify_checkpoint):
        line = refuse(lambda check=check: check(paths[target]), name, trace=False)
        assert str(paths[target]) in line
    warnings: list[str] = []
    assert load_newest(tmp_path, warnings.append).path == paths[source]
    assert len(warnings) == (target == 20)


def test_all_parts_of_another_step_under_the_old_manifest(tmp_path: Path) -> None:
    older, newer = save_small(tmp_path, 10), save_small(tmp_path, 20)
    for name in PARTS:
        shutil.copy(older / name, newer / name)
    refuse(lambda: load_checkpoint(newer), str(newer), trace=False)
    shutil.copy(older / "manifest.json", newer / "manifest.json")
    refuse(lambda: load_checkpoint(newer), "manifest.json is of step 10", trace=False)


def test_the_state_of_another_step_is_named_even_with_a_manifest_made_for_it(tmp_path: Path) -> None:
    contents: dict[str, Any] = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}
    older, newer = (save_checkpoint(tmp_path, step, state={"step": step}, **contents) for step in (10, 20))
    shutil.copy(older / "state.json", newer / "state.json")
    refuse(lambda: load_checkpoint(newer), "state.json: content has changed", trace=False)
    reseal(newer)
    for check in (load_checkpoint, verify_checkpoint):
        refuse(lambda check=check: check(newer), "state.json is of another step than manifest.json (20)", trace=False)


@pytest.mark.parametrize("name", [*PARTS, "manifest.json"])
def test_flipped_bits_cuts_and_zeros_are_found_and_named(tmp_path: Path, name: str) -> None:
    """40 bits drawn over each file, 10 cuts and 10 runs of zeros: never loaded, and the file is named."""
    path = save_small(tmp_path, 10) / name
    content, draw = path.read_bytes(), random.Random(name)
    damaged = []
    for _ in range(40):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        damaged.append(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
    damaged += [content[: draw.randrange(len(content))] for _ in range(10)]
    for _ in range(10):
        place = draw.randrange(len(content) - 20)
        damaged.append(content[:place] + bytes(20) + content[place + 20 :])
    for wrong in damaged:
        path.write_bytes(wrong)
        if wrong != content:
            # A manifest may also blame the file whose record was hit.
            with pytest.raises(UserError, match=r"manifest|model|optimizer|state" if name == "manifest.json" else name):
                load_checkpoint(path.parent)
    path.write_bytes(content)
    assert holds(path.parent, 10)


# --- the folder of a run ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as `gptlab train` leaves it, without the training."""
    write_corpus(tmp_path / "corpus")
    config = make_config(tmp_path, "run")
    made = RunDirectory.create(tmp_path / "run", config_to_json(config), {})
    ByteTokenizer().save(made.tokenizer_path)
    model_config = json.loads(made.config_path.read_text())["model"] | {"vocab_size": 257}
    model = build_model(
        type(config.model)(**model_config), device=torch.device("cpu"), compute_dtype=torch.float32, seed=1
    )
    weights = {name: value.detach() for name, value in model.named_parameters()}
    save_checkpoint(made.checkpoints_path, 10, model=weights, optimizer={}, state={"step": 10})
    made.set_status("finished")
    return tmp_path / "run"


def sample(run: Path, *words: str) -> str:
    code, out, err = command(["sample", run, "--prompt", "the ", "--max-tokens", 2, *words])
    if code == 0:
        return out
    assert (code, out) == (2, "")
    raise UserError(err.removesuffix("\n"))


def test_the_run_that_the_others_are_made_of_works(run: Path) -> None:
    assert sample(run).startswith("the ")


@pytest.mark.parametrize("harm", [harm for harm in ANY_JSON if harm not in ANY_FILE[:2]], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["config.json", "tokenizer/tokenizer.json"])
def test_hostile_json_in_a_run(run: Path, name: str, harm: Harm) -> None:
    harm(run / name)
    refuse(lambda: sample(run), Path(name).name, trace=False)


@pytest.mark.parametrize("harm", ANY_JSON, ids=lambda f: f.__name__)
def test_the_reader_of_a_runs_json(tmp_path: Path, harm: Harm) -> None:
    harm(tmp_path / "run.json")
    refuse(lambda: read_json_object(tmp_path / "run.json"), str(tmp_path / "run.json"))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n_layer", 10**9, "model.n_layer = 1000000000: is more than any model has"),
        ("n_layer", 10**30, "must be below 2^63"),
        ("n_layer", 9_999, "of another model"),
        ("n_embd", 2**19, "of another model"),
        ("n_embd", 10**18, "is more than any model has"),
        ("n_head", 7, "heads must divide"),
        ("mlp_ratio", 1e300, "is more than any model has"),
        ("vocab_multiple", 2**30, "of another model"),
        ("window_pattern", "\x1b[2J" * 100_000, "only the letters S"),
        ("norm", ["rmsnorm"] * 1_000_000, "must be one of"),
    ],
)
def test_absurd_sizes_in_a_configuration_build_nothing(run: Path, field: str, value: object, says: str) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"][field] = value
    (run / "config.json").write_text(json.dumps(config))
    refuse(lambda: sample(run), says, trace=False)


METRICS = [b"[" * 100_000, b"[]", b'"x"', b'{"kind": "eval"}', b'{"kind": "eval", "step": 10, "val_loss": []}']


@pytest.mark.parametrize("line", METRICS, ids=["deep", "list", "text", "no step", "no loss"])
def test_hostile_metrics(run: Path, line: bytes) -> None:
    (run / "metrics.jsonl").write_bytes(line + b"\n")
    refuse(lambda: sample(run, "--checkpoint", "best"), "metrics.jsonl", trace=False)


@pytest.mark.parametrize("harm", [pipe, endless], ids=lambda f: f.__name__)
def test_metrics_that_are_no_file(tmp_path: Path, harm: Harm) -> None:
    harm(tmp_path / "metrics.jsonl")
    refuse(lambda: read_metrics(tmp_path / "metrics.jsonl"), "not a regular file")
    refuse(lambda: AppendFile(tmp_path / "metrics.jsonl"), "cannot write")


def test_nothing_is_written_through_a_link_in_a_run(tmp_path: Path) -> None:
    """A run folder from elsewhere may have links where gptlab writes: what they lead to stays as it is."""
    mine = tmp_path / "mine.txt"
    mine.write_bytes(b"one\ntwo, without an end")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "log.txt", ".lock", "run.json", f".run.json.{os.getpid()}.tmp"):
        (run / name).symlink_to(mine)
    for name in ("metrics.jsonl", "log.txt"):
        refuse(lambda name=name: AppendFile(run / name), "cannot write", trace=False)
    with pytest.raises((UserError, OSError)), RunDirectory(run).lock():
        pass
    write_json_atomic(run / "run.json", {"status": "running"})
    assert not (run / "run.json").is_symlink()
    assert mine.read_bytes() == b"one\ntwo, without an end"


PLACES = (
    "checkpoints", "checkpoints/step-00000010", "checkpoints/step-00000010/model.safetensors", "tokenizer",
    "tokenizer/tokenizer.json", "metrics.jsonl", "log.txt", "config.json", "run.json", ".lock",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_link_in_a_run_folder_is_refused_by_every_command(run: Path, tmp_path: Path, place: str) -> None:
    """What a run removes and cuts must be its own: with `checkpoints` a link, that were another run's checkpoints."""
    for name in ("metrics.jsonl", "log.txt", ".lock"):
        (run / name).touch()
    other = tmp_path / "other"
    shutil.copytree(run, other)
    before = tree(other)
    path = run / place
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(other / place)
    for words in (
        ["train", "--resume", run], ["train", "--from", run], ["eval", run], ["sample", run, "--prompt", "a"],
        ["export", run, tmp_path / "exported"],
        ["train", "--init-from", run, "--run-dir", tmp_path / "n"],
    ):  # fmt: skip
        code, _, err = command(words)
        assert (code, err.count("\n")) == (2, 1), err
        assert f"{path} is a link" in err, words
    assert tree(other) == before
    assert not (tmp_path / "exported").exists()
    assert not (tmp_path / "n").exists()


def test_a_run_folder_may_be_reached_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run, target_is_directory=True)
    assert sample(tmp_path / "latest") == sample(run)


@pytest.mark.parametrize("name", ["tokenizer", "code", "run.json"])
def test_no_new_run_is_made_through_links(tmp_path: Path, name: str) -> None:
    """What a killed start leaves may be there already; links never are."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    refuse(lambda: RunDirectory.create(tmp_path / "run", {}, {}), f"{tmp_path / 'run' / name} is a link", trace=False)
    assert list((tmp_path / "mine").iterdir()) == []


def test_checkpoints_that_become_a_link_while_a_run_trains_stay(tmp_path: Path) -> None:
    save_small(tmp_path / "other", 10)
    before = tree(tmp_path / "other")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "other", target_is_directory=True)
    with pytest.raises(UserError, match="it is a link"):
        save_small(tmp_path / "checkpoints", 20)
    assert retain(tmp_path / "checkpoints", keep_last=1, keep_every_steps=None, best_step=None) == []
    discard_after(tmp_path / "checkpoints", 0)
    assert tree(tmp_path / "other") == before


def test_compiled_code_is_never_taken_from_where_a_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs what it finds in its cache; `data.cache_dir` of an untrusted config.json would lead there."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "own"))
    assert keep_compiled() == tmp_path / "own" / "compile"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


STRANGE_STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda state: [state.pop(key) for key in list(state) if key != "step"],
    "the model as a mark": lambda state: state.update(marks={"model": None, "saved": 3}),
    "a method of off_clock": lambda state: state.update(off_clock={"so_far": 1.0}),
    "bytes that are none": lambda state: state.update(metrics_bytes="x"),
    "seconds of text": lambda state: state.update(train_seconds="x"),
    "seconds that no float holds": lambda state: state.update(train_seconds=10**400),
    "data before the first": lambda state: state.update(loader={"next_step": -1}),
    "data that no integer numbers": lambda state: state.update(loader={"next_step": 10**30}),
    "half a step of data": lambda state: state.update(loader={"next_step": 1.5}),
    "a best loss of text": lambda state: state.update(best={"step": 2, "val_loss": "x"}),
    "a best saved one of lists": lambda state: state.update(best_saved={"step": [], "val_loss": []}),
    "a metric of text": lambda state: state.update(core_metric="x"),
    "a mean of fewer than no losses": lambda state: state.update(loss_ema={"sum": 1.0, "count": -1}),
    "losses of text": lambda state: state["faults"].update(losses=["x"]),
    "a mark that is a list": lambda state: state["marks"].update(evaluated=[1]),
}


def test_a_state_that_gptlab_did_not_write_is_one_line(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    original = train(tmp_path, "r", steps=4)
    for kind, change in STRANGE_STATES.items():
        run = tmp_path / kind.replace(" ", "-")
        shutil.copytree(original, run)
        RunDirectory(run).set_status("preempted")
        newest = max((run / "checkpoints").iterdir())
        state = json.loads((newest / "state.json").read_text())
        change(state)
        (newest / "state.json").write_text(json.dumps(state))
        reseal(newest)
        code, _, err = command(["train", "--resume", run])
        assert (code, err.count("\n")) == (2, 1), (kind, err)
        assert "its state was not written by gptlab" in err


# --- --from -----------------------------------------------------------------------------------------------------------


NOW = dict.fromkeys(
    ("python_version", "torch_version", "cuda_version", "device_name", "cpu", "dtype", "threads", "world_size",
     "data_fingerprint", "tokenizer_fingerprint", "gptlab_version", "git_commit", "git_dirty"), "now",
) | {"code_fingerprint": "own"}  # fmt: skip


def what_is_said(run: Path, kept: str = PATCH_NAME, **recorded: object) -> str:
    """By `--from`, of a run with this in its run.json and one empty file in its code folder."""
    (run / "code").mkdir(parents=True)
    (run / "config.json").touch()
    (run / "run.json").write_text(json.dumps({"code_fingerprint": "other", **recorded}))
    (run / "code" / kept).write_bytes(b"")
    return "\n".join(what_differs(RunDirectory(run), NOW, {}))


def command_in(said: str) -> list[str]:
    """The words of the command to copy, as a shell takes it apart."""
    return shlex.split(next(line for line in said.splitlines() if "to have it" in line).partition("to have it: ")[2])


@pytest.mark.parametrize(
    "commit", ["x; touch trap", "$(touch trap)", "--upload-pack=touch trap", "HEAD", "`touch trap`", ["a"], "a" * 65]
)
def test_no_command_to_copy_has_a_commit_that_is_none(tmp_path: Path, commit: object) -> None:
    assert "git checkout" not in what_is_said(tmp_path / "run", git_commit=commit)


def test_paths_in_commands_to_copy_are_quoted(tmp_path: Path) -> None:
    run = tmp_path / "a'; touch trap; echo '"
    words = command_in(what_is_said(run, git_commit="a" * 40))
    assert words == ["git", "checkout", "a" * 40, "&&", "git", "apply", str(run / "code" / PATCH_NAME)]
    run = tmp_path / "b $(touch trap)"
    assert command_in(what_is_said(run, ZIP_NAME))[:3] == ["unzip", str(run / "code" / ZIP_NAME), "-d"]


def test_what_a_run_recorded_cannot_fill_the_terminal(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    said = what_is_said(tmp_path / "run", torch_version=long, cpu=[[1]] * 100_000, gptlab_version={"a": long})
    assert len(said) < 5_000
