"""The CORE tasks: unpacked whole and safely, or not at all."""

from __future__ import annotations

import stat
import sys
import zipfile
from pathlib import Path

import pytest
from local_hub import LocalHub

from gptlab.cli.main import main
from gptlab.config.errors import UserError
from gptlab.data.corpus.known_corpora import WebFile
from gptlab.eval import core_bundle
from gptlab.eval.core_bundle import unpack

TASKS = """\
icl_tasks:
-
  label: copa
  dataset_uri: commonsense/copa.jsonl
  num_fewshot: [0]
- dataset_uri: "world/arc.jsonl"  # quoted, and the first key of its entry
  label: arc
"""
CONTENTS = {
    "eval_bundle/core.yaml": TASKS,
    "eval_bundle/eval_meta_data.csv": "Eval Task,Random baseline\ncopa,50\n",
    "eval_bundle/eval_data/commonsense/copa.jsonl": '{"choices": ["a", "b"]}\n' * 50,
    "eval_bundle/eval_data/world/arc.jsonl": '{"query": "?"}\n',
    "__MACOSX/eval_bundle/._core.yaml": "left by an archiver",
    "eval_bundle/eval_data/.DS_Store": "left by a file browser",
    "README": "beside the bundle",
}


def pack(path: Path, contents: dict[str, str], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (stat.S_IFLNK if name == link else stat.S_IFREG | 0o644) << 16
            archive.writestr(member, text)
    return path


def test_unpacks_without_the_folder_around_it(tmp_path: Path) -> None:
    unpack(pack(tmp_path / "b.zip", CONTENTS), tmp_path / "core")
    found = {path.relative_to(tmp_path / "core").as_posix() for path in (tmp_path / "core").rglob("*.*")}
    assert found == {"core.yaml", "eval_meta_data.csv", "eval_data/commonsense/copa.jsonl", "eval_data/world/arc.jsonl"}
    assert (tmp_path / "core" / "core.yaml").read_text() == TASKS
    flat = {name.removeprefix("eval_bundle/"): text for name, text in CONTENTS.items()}
    unpack(pack(tmp_path / "flat.zip", flat), tmp_path / "flat")
    assert (tmp_path / "flat" / "eval_data" / "world" / "arc.jsonl").is_file()


@pytest.mark.parametrize("name", ["../outside", "eval_bundle/../../outside", "/outside", "eval_bundle\\..\\x", "C:/x"])
def test_no_path_leads_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="a path that leads elsewhere"):
        unpack(pack(tmp_path / "b.zip", CONTENTS | {name: "gotcha"}), tmp_path / "inner" / "core")
    assert not list(tmp_path.rglob("outside"))


def test_no_links(tmp_path: Path) -> None:
    archive = pack(tmp_path / "b.zip", CONTENTS | {"eval_bundle/passwd": "/etc/passwd"}, link="eval_bundle/passwd")
    with pytest.raises(UserError, match="holds eval_bundle/passwd, a link"):
        unpack(archive, tmp_path / "core")


def test_damage_is_found(tmp_path: Path) -> None:
    archive = pack(tmp_path / "b.zip", CONTENTS)
    whole = archive.read_bytes()
    place = whole.index(b"copa.jsonl") + len("copa.jsonl") + 3
    archive.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(UserError, match="arrived damaged"):
        unpack(archive, tmp_path / "core")
    archive.write_bytes(whole[:-30])
    with pytest.raises(UserError, match="arrived damaged"):
        unpack(archive, tmp_path / "core")


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("core.yaml", "0 files core.yaml"),
        ("eval_meta_data.csv", "it has no eval_meta_data.csv"),
        ("eval_data/world/arc.jsonl", "it has no eval_data/world/arc.jsonl"),
    ],
)
def test_all_of_it_or_nothing(tmp_path: Path, gone: str, message: str) -> None:
    contents = {name: text for name, text in CONTENTS.items() if name != f"eval_bundle/{gone}"}
    with pytest.raises(UserError, match=message):
        unpack(pack(tmp_path / "b.zip", contents), tmp_path / "core")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("icl_tasks: []", "core.yaml is damaged: it needs tasks"),
        ("icl_tasks: [{label: copa", "core.yaml is damaged"),
        ("icl_tasks: [{label: copa}]", "it has no eval_data/None"),
        ("icl_tasks: [{label: copa, dataset_uri: a b.jsonl}]", "it has no eval_data/a b.jsonl"),
    ],
)
def test_its_tasks_are_read_as_they_are_to_be_measured(tmp_path: Path, tasks: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        unpack(pack(tmp_path / "b.zip", CONTENTS | {"eval_bundle/core.yaml": tasks}), tmp_path / "core")


def test_what_would_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_bundle, "LARGEST_BYTES", 1000)
    with pytest.raises(UserError, match="would unpack to more than"):
        unpack(pack(tmp_path / "b.zip", CONTENTS), tmp_path / "core")


def test_a_bundle_put_there_by_hand_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path))
    unpack(pack(tmp_path / "b.zip", CONTENTS), tmp_path / "core")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["data", "prepare", "core"]) == 0
    assert (tmp_path / "core" / "core.yaml").read_text() == TASKS


def test_prepare_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Fetched once; a damaged archive leaves nothing behind, and comes again."""
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    bundle = pack(tmp_path / "b.zip", CONTENTS).read_bytes()
    with LocalHub({"b.zip": bundle[:-30]}).running() as server:
        monkeypatch.setattr(
            core_bundle, "CORE_BUNDLE", WebFile(address=f"{server.address}/web/b.zip", file="b.zip", sha256=None)
        )
        assert main(["data", "prepare", "core"]) == 2
        assert "b.zip arrived damaged" in capfd.readouterr().err
        assert not (tmp_path / "cache" / "core").exists()
        assert not list((tmp_path / "cache" / "downloads").glob("b.zip*"))
        server.files["b.zip"] = bundle
        assert main(["data", "prepare", "core"]) == 0
        assert f"the CORE tasks are in {tmp_path / 'cache' / 'core'}" in capfd.readouterr().out
        server.requests.clear()
        assert main(["data", "prepare", "--data", "core"]) == 0
        assert server.requests == []
    assert (tmp_path / "cache" / "core" / "eval_data" / "world" / "arc.jsonl").is_file()
    assert main(["data", "list"]) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  core  ")]
    assert line.split()[1] == "yes"
