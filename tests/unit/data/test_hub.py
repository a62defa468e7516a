"""Corpora by name: the grammar, and downloads by a real huggingface_hub client from a hub on loopback."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_runs
from corpora import corpus_of
from local_hub import COMMIT, LocalHub

from gptlab.cli.main import main
from gptlab.config.errors import UserError
from gptlab.data.corpus import hub as module
from gptlab.data.corpus import known_corpora
from gptlab.data.corpus.hub import download_sources, download_web_file
from gptlab.data.corpus.known_corpora import (
    CORE_BUNDLE,
    CORPORA,
    HubFiles,
    KnownCorpus,
    WebFile,
    fixed_validation,
    named_source,
    read_record,
    record_path,
    training_files,
    web_path,
)
from gptlab.runtime.records.console import Console

SOURCE = "hub:lab/texts"
ROOT = Path(__file__).parents[3]


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue()


def shards(n: int) -> dict[str, bytes]:
    """`n` training files of three documents each, and what a repository has besides."""
    texts = ("A text about {}. " * 9, "One more, on {}. " * 5, "The end of {}.")
    files = {
        f"data/train-{i:05}.parquet": parquet(*(text.replace("{}", f"matter {i}") for text in texts)) for i in range(n)
    }
    return files | {"README.md": b"# Texts\n", "data/test-00000.parquet": parquet("Not to be trained on.")}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """gptlab's cache; waits between attempts are short."""
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    return tmp_path / "cache"


@pytest.fixture
def hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub(shards(3)).running() as server:
        point_to(server.address, root, monkeypatch)
        yield server


def point_to(address: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT and HF_HOME do at the import of huggingface_hub."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root.parent / "huggingface"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)


def download(root: Path, source: str = SOURCE, hub_files: int | None = None) -> str:
    """What the console shows."""
    stream = io.StringIO()
    with Console(stream=stream) as console:
        download_sources([source], hub_files, root, console)
    return stream.getvalue()


def texts_of(source: str = SOURCE, hub_files: int | None = None) -> list[str]:
    return list(corpus_of([source], hub_files=hub_files).texts())


# Names


def test_the_table_is_whole() -> None:
    assert [corpus.name for corpus in CORPORA] == [
        "fineweb-edu", "climbmix", "tinystories", "tinyshakespeare", "openwebtext", "fineweb10b-gpt2",
    ]  # fmt: skip
    for corpus in CORPORA:
        assert 0 < corpus.default_files <= corpus.all_files
        assert corpus.place.address.startswith("https://")
    # autoresearch and nanochat validate on the last shard of their corpus.
    lasts = {"fineweb-edu": "shard_01822.parquet", "climbmix": "shard_06542.parquet"}
    for corpus in CORPORA:
        if corpus.name in lasts:
            paths = [f"shard_{i:05}.parquet" for i in range(corpus.all_files + 1)] + ["README.md"]
            source = named_source(corpus.name)
            assert source is not None
            train, val = source.wanted(paths, None)
            assert train == paths[: corpus.default_files]
            assert val == [lasts[corpus.name]]
            assert len(source.wanted(paths, 10**6)[0]) == corpus.all_files


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("hub:a/b", HubFiles(repo="a/b")),
        ("hub:a/b.c-d_e@v1.0", HubFiles(repo="a/b.c-d_e", revision="v1.0")),
        ("hub:a/b/x/*.txt", HubFiles(repo="a/b", files="x/*.txt")),
        ("hub:a/b@refs%2Fpr%2F3/f.jsonl", HubFiles(repo="a/b", revision="refs/pr/3", files="f.jsonl")),
    ],
)
def test_addresses_on_the_hub(source: str, place: HubFiles) -> None:
    named = named_source(source)
    assert named is not None
    assert (named.name, named.place, named.validation) == (source, place, False)


@pytest.mark.parametrize("source", ["hub:", "hub:a", "hub:/b", "hub:a/", "hub:a/b@", "hub:a b/c", "hub:../b@c@d"])
def test_addresses_that_are_none(source: str) -> None:
    with pytest.raises(UserError, match="hub:OWNER/NAME"):
        named_source(source)


def test_a_path_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_source("tinystories") is not None
    (tmp_path / "tinystories").mkdir()
    assert named_source("tinystories") is None
    assert [named_source(source) for source in ("stdlib", "notes/", "*.txt", "val", "fineweb")] == [None] * 5


def test_what_validates() -> None:
    sources = ["stdlib", "climbmix", "tinyshakespeare", "fineweb10b-gpt2", "hub:a/b"]
    assert fixed_validation(sources) == ("climbmix:val", "fineweb10b-gpt2:val")
    assert fixed_validation(["climbmix:val"]) == ()  # trained on as any other text
    val = named_source("climbmix:val")
    assert val is not None
    assert val.validation
    with pytest.raises(UserError, match="tinyshakespeare has no files that validate"):
        named_source("tinyshakespeare:val")


def test_files_without_a_glob() -> None:
    place = HubFiles(repo="a/b")
    assert training_files(["z.jsonl", "b.parquet", "a.parquet", "README.md"], place) == (["a.parquet", "b.parquet"], [])
    assert training_files(["x/test.txt", "x/train.txt", "x/dev.txt"], place) == (["x/train.txt"], [])
    assert training_files(["s_2.bin", "s_1.bin", "code.py"], place) == (["s_1.bin", "s_2.bin"], [])
    split = HubFiles(repo="a/b", files="*.bin", validation="*val*")
    assert training_files(["d/t1.bin", "d/val.bin", "x.txt"], split) == (["d/t1.bin"], ["d/val.bin"])


# Downloads


def test_all_files_come_from_one_commit_in_parallel(hub: LocalHub, root: Path) -> None:
    hub.together = threading.Barrier(3)  # Breaks unless three GETs are under way at once.
    shown = download(root)
    assert sorted(hub.downloads()) == [f"data/train-{i:05}.parquet" for i in range(3)]
    assert all(COMMIT in path for _, path, _ in hub.requests if "/resolve/" in path)
    n_bytes = sum(len(data) for name, data in hub.files.items() if "train" in name)
    assert f"downloading {SOURCE} (3 files): {n_bytes / 1e6:,.1f} MB in " in shown
    assert len(texts_of()) == 9


def test_a_second_time_asks_nothing(hub: LocalHub, root: Path) -> None:
    download(root)
    hub.requests.clear()
    assert download(root) == ""
    assert download(root, hub_files=2) == ""
    assert hub.requests == []


def test_fewer_files_then_more(hub: LocalHub, root: Path) -> None:
    download(root, hub_files=1)
    assert hub.downloads() == ["data/train-00000.parquet"]
    assert len(texts_of(hub_files=1)) == 3
    with pytest.raises(UserError, match=r"2 of its 3 files are not on this machine \(data/train-00001.*prepare"):
        texts_of()
    # The hub moves on; what comes later still is of the commit that the first file is of.
    hub.files |= {"data/train-00009.parquet": parquet("new")}
    download(root)
    assert len(hub.downloads()) == 3
    assert len(texts_of()) == 9


def test_a_commit_that_is_gone(hub: LocalHub, root: Path) -> None:
    download(root, hub_files=1)
    hub.commit = "f" * 40
    with pytest.raises(UserError, match=r"commit 0123456789ab .* is gone; delete .*lab--texts-.*json to begin"):
        download(root)
    record_path(HubFiles(repo="lab/texts"), root).unlink()
    download(root)
    assert len(texts_of()) == 9


def test_one_failure_stops_the_others() -> None:
    """Nobody waits for gigabytes that are of no use any more; Ctrl-C goes the same way."""
    stopped = threading.Event()

    def endless(meter: module._Meter) -> None:
        bar = meter.bar("endless")()
        try:
            for _ in range(3000):  # 30 seconds
                bar.update(1)
                threading.Event().wait(0.01)
        except module._StoppedError:
            stopped.set()
            raise

    def failing(meter: module._Meter) -> None:
        raise KeyboardInterrupt

    with Console(stream=io.StringIO()) as console, pytest.raises(KeyboardInterrupt):
        module._in_parallel({"endless": endless, "failing": failing}, "x", None, console, lambda name, result: None)
    assert stopped.is_set()


def test_a_cut_connection_goes_on_where_it_stopped(hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = random.Random(1).choices(b"abcdefgh \n", k=1_000_000)
    hub.files = {"long.txt": bytes(letters)}
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.faults["long.txt"] = ["cut"]
    download(root)
    first, second = (asked for method, path, asked in hub.requests if method == "GET" and "/resolve/" in path)
    assert first is None
    assert second == f"bytes={500_000 // 65536 * 65536}-"
    assert texts_of() == [bytes(letters).decode()]


def test_wrong_contents_come_again_and_are_never_kept(hub: LocalHub, root: Path, tmp_path: Path) -> None:
    name = "data/train-00001.parquet"
    hub.faults[name] = ["corrupt"]
    download(root, hub_files=2)
    assert sorted(hub.downloads()) == ["data/train-00000.parquet", name, name]
    assert len(texts_of(hub_files=2)) == 6
    name = "data/train-00002.parquet"
    hub.faults[name] = ["corrupt"] * 9
    with pytest.raises(UserError, match=r"train-00002.parquet arrived with other contents .*, twice; nothing of it"):
        download(root)
    assert not list((tmp_path / "huggingface").rglob("*train-00002*"))
    with pytest.raises(UserError, match="1 of its 3 files"):
        texts_of()


def test_files_in_git_are_verified_too(hub: LocalHub, root: Path) -> None:
    hub.files = {"notes.txt": b"A small file that is no LFS object."}
    hub.small = {"notes.txt"}
    hub.faults["notes.txt"] = ["corrupt"]
    download(root)
    assert hub.downloads() == ["notes.txt"] * 2
    record = read_record(HubFiles(repo="lab/texts"), root)
    assert record is not None
    # Known from then on: SHA-256 of the contents.
    assert record.verified["notes.txt"].sha256 == hashlib.sha256(hub.files["notes.txt"]).hexdigest()


def test_a_busy_server_is_asked_again(hub: LocalHub, root: Path) -> None:
    hub.api_faults = ["503", "429"]
    hub.faults["data/train-00000.parquet"] = ["503", "500"]
    download(root)
    assert len(texts_of()) == 9


def test_what_has_arrived_is_kept(hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARALLEL_FILES", 1)
    hub.faults["data/train-00002.parquet"] = ["500"] * 4
    with pytest.raises(UserError, match="answers with status 500; try later"):
        download(root)
    hub.requests.clear()
    download(root)
    assert hub.downloads() == ["data/train-00002.parquet"]


@pytest.mark.parametrize(
    ("source", "faults", "message"),
    [
        ("hub:lab/nothing", [], "has no data set lab/nothing (status 404), or keeps it private; if so, log in with"),
        ("hub:lab/texts", ["401"], "refuses data set lab/texts (status 401): accept its terms on its page, and log in"),
        ("hub:lab/texts", ["403 GatedRepo"], "refuses data set lab/texts (status 403): accept its terms"),
        ("hub:lab/texts@v9", [], "has no such revision of data set lab/texts"),
        ("hub:lab/texts/*.flac", [], "none of its files match"),
        ("hub:lab/texts", ["500"] * 9, "answers with status 500; try later"),
    ],
)
def test_refusals_are_one_line(
    hub: LocalHub, root: Path, source: str, faults: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.api_faults = list(faults)
    assert main(["data", "prepare", source]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "`hf auth login`" in error or "log in" not in error
    assert len(error.splitlines()) == 1
    assert not hub.downloads()


def test_nobody_answers(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalHub({}).running() as server:
        address = server.address
    point_to(address, root, monkeypatch)  # Its port is free again.
    for source in (SOURCE, "fineweb-edu"):
        assert main(["data", "prepare", source]) == 2
        error = capfd.readouterr().err
        assert f"{source}: cannot reach {address} (" in error
        assert "only downloading needs the network" in error
        assert len(error.splitlines()) == 1
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        download(root)


def test_a_disk_that_is_too_small(hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(root.parent)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"the 3 files to download take 0.0 GB.*--hub-files N takes fewer"):
        download(root)
    assert not hub.downloads()


def test_fingerprint_is_that_of_the_same_files_in_a_folder(hub: LocalHub, root: Path, tmp_path: Path) -> None:
    download(root)
    for name, data in hub.files.items():
        if "train" in name:
            (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "folder" / name).write_bytes(data)
    by_name, by_path = corpus_of([SOURCE]), corpus_of([str(tmp_path / "folder")])
    assert by_name.fingerprint() == by_path.fingerprint()
    # Also of a file that was copied or touched since.
    (file,) = list((tmp_path / "huggingface").rglob("train-00000.parquet"))
    os.utime(file, (1, 1))
    assert corpus_of([SOURCE]).fingerprint() == by_path.fingerprint()


@pytest.mark.parametrize("time_kept", [False, True])
def test_a_file_that_is_not_what_was_downloaded_comes_again(
    hub: LocalHub, root: Path, tmp_path: Path, time_kept: bool
) -> None:
    """A byte of it fell over. Where its time says nothing, reading it does."""
    hub.files = {"a.txt": b"The first of two.", "b.txt": b"The second text."}
    download(root)
    (file,) = list((tmp_path / "huggingface").rglob("a.txt"))
    before = file.stat()
    file.resolve().write_bytes(b"The third of two.")
    if time_kept:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        corpus = corpus_of([SOURCE])
        corpus.fingerprint()
        message = f"{file} is not what was downloaded any more: delete it, and run `gptlab data prepare {SOURCE}`"
        with pytest.raises(UserError, match=re.escape(message)):
            list(corpus.texts())
        file.unlink()
    with pytest.raises(UserError, match="1 of its 2 files"):
        texts_of()
    download(root)
    assert texts_of() == ["The first of two.", "The second text."]


def test_a_damaged_file_is_downloaded_again(hub: LocalHub, root: Path, tmp_path: Path) -> None:
    download(root)
    (file,) = list((tmp_path / "huggingface").rglob("train-00000.parquet"))
    file.resolve().write_bytes(b"short")
    with pytest.raises(UserError, match="1 of its 3 files"):
        texts_of()
    hub.requests.clear()
    download(root)
    assert hub.downloads() == ["data/train-00000.parquet"]
    assert len(texts_of()) == 9


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 99}', '{"schema": 1, "files": 3}', "[1]"])
def test_a_record_that_cannot_be_read_is_none(hub: LocalHub, root: Path, text: str) -> None:
    place = HubFiles(repo="lab/texts")
    record_path(place, root).parent.mkdir(parents=True)
    record_path(place, root).write_text(text)
    assert read_record(place, root) is None
    download(root)
    assert len(texts_of()) == 9


def call_it_ours(place: HubFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `place` known as `ours`."""
    known = KnownCorpus(
        name="ours", what="for tests", lineage="none", place=place, license="none",
        default_files=2, all_files=3, file_bytes=1000,
    )  # fmt: skip
    monkeypatch.setattr(known_corpora, "CORPORA", (known,))
    monkeypatch.setattr("gptlab.cli.data.CORPORA", (known,))


def test_a_named_corpus_with_its_validation_file(
    hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call_it_ours(HubFiles(repo="lab/texts", files="data/*.parquet", validation="data/test-*"), monkeypatch)
    with pytest.raises(UserError, match=r"prepare ours` downloads what is missing of 2 files, about 0.0 MB"):
        texts_of("ours")
    assert main(["data", "prepare", "ours", "--tokenizer", "byte"]) == 0
    out = capsys.readouterr().out
    assert sorted(hub.downloads()) == ["data/test-00000.parquet", *(f"data/train-0000{i}.parquet" for i in (0, 1))]
    assert "train: 6 documents" in out
    n_bytes = len("Not to be trained on.")
    assert f"validation: 1 documents, {n_bytes} bytes, {n_bytes + 1} tokens" in out  # and its BOS
    assert texts_of("ours:val") == ["Not to be trained on."]
    main(["data", "list"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ours ")]
    assert "2 files + 1 val" in line


def test_only_what_validates(hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call_it_ours(HubFiles(repo="lab/texts", files="data/*.parquet", validation="data/test-*"), monkeypatch)
    download(root, "ours:val")
    assert hub.downloads() == ["data/test-00000.parquet"]


def test_token_shards_by_name(
    hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call_it_ours(HubFiles(repo="lab/texts", files="fw_*.bin", validation="fw_val_*.bin"), monkeypatch)
    header = np.zeros(256, "<i4")
    for i, file in enumerate(
        ("fw_val_000000.bin", "fw_train_000001.bin", "fw_train_000002.bin", "fw_train_000003.bin")
    ):
        header[:3] = 20240520, 1, 100 + i
        hub.files[file] = header.tobytes() + np.full(100 + i, 262, "<u2").tobytes()
    assert main(["data", "prepare", "ours", "--rows", "sequential"]) == 0
    out = capsys.readouterr().out
    assert len(hub.downloads()) == 3
    assert "203 tokens" in next(line for line in out.splitlines() if line.startswith("train: "))
    assert "100 tokens" in next(line for line in out.splitlines() if line.startswith("validation: "))


# The whole way


def gptlab_process(
    arguments: list[str], server: LocalHub, folder: Path, epilogue: str = ""
) -> subprocess.CompletedProcess[str]:
    """`gptlab ARGUMENTS` in a process of its own, whose Hugging Face home and caches lie in `folder`."""
    script = f"import sys\nfrom gptlab.cli.main import main\ncode = main(sys.argv[1:])\n{epilogue}\nsys.exit(code)"
    environment = os.environ | {
        "HF_ENDPOINT": server.address, "HF_HOME": str(folder / "hf"), "GPTLAB_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_CACHE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_prepare_then_train_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "cache"))
    flags = {"data.source": [SOURCE], "data.hub_files": 2, "data.cache_dir": tmp_path / "cache", "steps": 2}
    train = ["train", *tiny_runs.arguments(tmp_path, "run", flags)]
    with LocalHub(shards(3)).running() as server:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "huggingface_hub", None)  # Importing it raises.
            code, _, error = tiny_runs.command(train)
        assert code == 2
        assert error == (
            f"gptlab: error: {SOURCE}: it is not on this machine; `gptlab data prepare {SOURCE} --hub-files 2` "
            "downloads what is missing of 2 files\n"
        )
        assert server.requests == []
        server.faults["data/train-00001.parquet"] = ["cut"]  # huggingface_hub would warn.
        done = gptlab_process(["data", "prepare", SOURCE, "--hub-files", "2", "--tokenizer", "byte"], server, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"downloading {SOURCE} (2 files): " in done.stdout
        assert "train: " in done.stdout
        # No telemetry, no question about who calls: only the data set is asked for.
        assert {path for _, path, _ in server.requests} == {
            "/api/datasets/lab/texts/revision/main", f"/api/datasets/lab/texts/tree/{COMMIT}",
            *(f"/datasets/lab/texts/resolve/{COMMIT}/data/train-0000{i}.parquet" for i in (0, 1)),
        }  # fmt: skip
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, error = tiny_runs.command(train)
    assert code == 0, error
    assert tiny_runs.lines_of(tmp_path / "run", "train")[-1]["step"] == 2


def test_nothing_else_asks_the_hub(tmp_path: Path) -> None:
    """Nor does it import what downloads, or what takes long to import."""
    light = "assert not {'huggingface_hub', 'torch', 'pyarrow', 'tokenizers', 'transformers'} & set(sys.modules)"
    with LocalHub({}).running() as server:
        done = gptlab_process(["data", "list"], server, tmp_path, f"main(['train', '--list'])\n{light}")
        assert done.returncode == 0, done.stderr
        assert server.requests == []


def test_a_plan_needs_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, out, error = tiny_runs.command(["plan", "quickstart", "--depth", "1", "--data", "fineweb-edu"])
    assert code == 0, error
    assert "depth 1" in out


# Single files of the web


def fetch(place: WebFile, path: Path) -> None:
    with Console(stream=io.StringIO()) as console:
        download_web_file("it", place, path, None, console)


def test_a_file_of_the_web(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 1000
    hub.files["input.txt"] = text
    place = WebFile(address=f"{hub.address}/web/input.txt", file="t.txt", sha256=hashlib.sha256(text).hexdigest())
    hub.faults["input.txt"] = ["503", "cut", "corrupt"]
    fetch(place, tmp_path / "downloads" / "t.txt")
    assert (tmp_path / "downloads" / "t.txt").read_bytes() == text
    assert [asked for _, path, asked in hub.requests if path == "/web/input.txt"][
        2
    ] == f"bytes={len(text) // 8192 * 4096}-"
    hub.requests.clear()
    fetch(place, tmp_path / "downloads" / "t.txt")
    assert hub.requests == []
    hub.faults["input.txt"] = ["corrupt"] * 9
    with pytest.raises(UserError, match="arrived with other contents"):
        fetch(place, tmp_path / "elsewhere" / "t.txt")
    assert not list((tmp_path / "elsewhere").glob("t.txt*"))
    gone = WebFile(address=f"{hub.address}/web/gone.txt", file="gone.txt", sha256=None)
    with pytest.raises(UserError, match=r"has no such file \(status 404\)"):
        fetch(gone, tmp_path / "gone.txt")


def test_tiny_shakespeare_by_name(
    hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (known,) = [corpus for corpus in CORPORA if corpus.name == "tinyshakespeare"]
    assert isinstance(known.place, WebFile)
    with pytest.raises(UserError, match="tinyshakespeare: it is not on this machine; `gptlab data prepare tinysh"):
        texts_of("tinyshakespeare")
    web_path(known.place, root).parent.mkdir(parents=True)
    web_path(known.place, root).write_text("First Citizen: speak, speak.")
    assert texts_of("tinyshakespeare") == ["First Citizen: speak, speak."]
    assert main(["data", "prepare", "tinyshakespeare", "--tokenizer", "char", "--split", "tail"]) == 0
    assert "ready in" in capsys.readouterr().out


def test_core_is_no_corpus(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="not text to train on"):
        corpus_of(["core"])
    assert main(["data", "prepare", "core", "stdlib"]) == 2
    assert "prepare it alone" in capfd.readouterr().err
    assert CORE_BUNDLE.sha256 is None
