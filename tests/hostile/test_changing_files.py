"""Files that change while gptlab reads them: what is prepared is never kept as that of another text, and what is read
while training never brings the process down."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_runs as tiny
from corpora import corpus_of

from gptlab.config.errors import UserError
from gptlab.config.run import DataConfig, TokenizerConfig
from gptlab.data import prepare as prepare_module
from gptlab.data.corpus import documents as corpus_module
from gptlab.data.prepare import prepare
from gptlab.data.tokens.foreign_files import TokenFiles
from gptlab.data.tokens.shards import Shard, TokenSplit
from gptlab.runtime.files import cache as file_hashes
from gptlab.runtime.files.cache import file_sha256

BYTE = TokenizerConfig(kind="byte")
OLD = [f"document {n} as it was" for n in range(30)]
NEW = [text.replace("was", "is ") for text in OLD]


def write(path: Path, texts: list[str]) -> None:
    """As many bytes for OLD as for NEW, but for packed ones and Parquet."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif path.suffix == ".jsonl":
        path.write_text(lines)
    else:
        path.write_text("\n".join(texts))


@pytest.fixture(params=["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    write(path, OLD)
    return path


def config(source: Path) -> DataConfig:
    return DataConfig(source=(str(source),), cache_dir=str(source.parent / "cache"))


def cached(source: Path) -> list[Path]:
    return [path for path in (source.parent / "cache").glob("*/[!.]*") if path.is_dir()]


def test_a_corpus_that_changes_behind_its_fingerprint_is_not_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once nothing writes to it any more, its tokens are those of a folder that never knew the other text."""
    fingerprint = corpus_module.Corpus.fingerprint

    def changed_behind_it(self: Any) -> str:
        found = fingerprint(self)
        write(source, NEW)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(corpus_module.Corpus, "fingerprint", changed_behind_it)
        with pytest.raises(UserError, match=f"{source.name} changed while it was read: start again"):
            prepare(config(source), BYTE)
    kept = [path for path in cached(source) if path.parent.name == "tokens"]
    assert kept == []
    prepared = prepare(config(source), BYTE)
    text = prepared.tokenizer.decode(prepared.train.read(0, prepared.train.n_tokens))
    assert "is " in text
    assert "was" not in text


def test_a_text_that_is_back_as_it_was_when_it_has_been_read_is_not_kept_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were read are hashed, not those that lie there before and behind it."""
    source = tmp_path / "a.jsonl"
    write(source, OLD)
    read_documents = corpus_module.read_documents

    def another_for_a_moment(*arguments: Any) -> Iterator[str]:
        write(source, NEW)
        try:
            yield from read_documents(*arguments)
        finally:
            write(source, OLD)

    monkeypatch.setattr(corpus_module, "read_documents", another_for_a_moment)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(config(source), BYTE)


def test_a_corpus_that_changes_while_a_tokenizer_learns_a_part_of_it_is_not_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_on_a_part(config: Any, texts: Iterator[str], **options: Any) -> Any:
        next(texts)
        write(source, NEW)
        return train(config, [*OLD, *NEW], **options)

    train = prepare_module.train_tokenizer
    monkeypatch.setattr(prepare_module, "train_tokenizer", train_on_a_part)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(config(source), TokenizerConfig(vocab_size=260))
    assert cached(source) == []


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"caf\xe9")], ids=["gone", "no text"])
def test_a_file_of_a_folder_that_stops_being_text_is_noticed(
    tmp_path: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(OLD):
        (tmp_path / f"{number:02}.txt").write_text(text)
    corpus = corpus_of([tmp_path])
    corpus.fingerprint()
    change(tmp_path / "07.txt")
    with pytest.raises(UserError, match=r"07\.txt changed while it was read"):
        list(corpus.texts())


class Hashed:
    """How many files were hashed in full."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times = 0
        digest = file_hashes.hashlib.file_digest
        patch.setattr(file_hashes.hashlib, "file_digest", lambda *of: (self.count(), digest(*of))[1])

    def count(self) -> None:
        self.times += 1


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, of long ago (only its modification time can be set back)."""
    monkeypatch.setattr(file_hashes, "REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(file_hashes, "SETTLED_NS", -1)
    (tmp_path / "large.txt").write_bytes(b"x" * 5000)
    return tmp_path / "large.txt"


def test_a_large_file_is_hashed_once_until_it_changes(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Hashed(monkeypatch)
    found = [file_sha256(large, large.parent / "cache") for _ in range(3)]
    assert (len(set(found)), hashed.times) == (1, 1)
    (large.parent / "small.txt").write_bytes(b"x" * 1000)
    for times in (2, 3):
        file_sha256(large.parent / "small.txt", large.parent / "cache")
        assert hashed.times == times
    for record in (large.parent / "cache" / "hashes").iterdir():
        record.write_text("{}")
    assert file_sha256(large, large.parent / "cache") == found[0]
    assert hashed.times == 4


def changed_in_place(path: Path) -> None:
    """The same size, and by its modification time not touched."""
    status = path.stat()
    path.write_bytes(b"x" * 4000 + b"y" * 1000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    """By a file of the same size and times."""
    status = path.stat()
    (path.parent / "other").write_bytes(b"y" * 5000)
    os.utime(path.parent / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (path.parent / "other").replace(path)


@pytest.mark.parametrize("change", [changed_in_place, replaced, lambda path: path.write_bytes(b"y" * 5000)])
def test_what_is_remembered_of_a_file_is_not_that_of_another(large: Path, change: Callable[[Path], object]) -> None:
    before = file_sha256(large, large.parent / "cache")
    change(large)
    assert file_sha256(large, large.parent / "cache") != before


def test_a_file_that_was_just_written_is_not_remembered(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of its file system may not have ticked since, and then another write leaves no trace in its times."""
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 10**12)
    hashed = Hashed(monkeypatch)
    for times in (1, 2):
        file_sha256(large, large.parent / "cache")
        assert hashed.times == times


def test_tokens_of_which_most_changed_are_others(tmp_path: Path) -> None:
    """A train.bin of 20 MB in which all changed but sixteen blocks spread over it from end to end."""
    folder = tmp_path / "owt"
    folder.mkdir()
    tokens = np.zeros(10 << 20, dtype="<u2")
    np.zeros(1000, dtype="<u2").tofile(folder / "val.bin")
    data = DataConfig(source=(str(folder),), cache_dir=str(tmp_path / "cache"), rows="random")
    seen = []
    for change in (False, True):
        if change:
            changed = np.ones(len(tokens), dtype=bool)
            for block in range(16):
                first = (tokens.nbytes - (64 << 10)) * block // 15 // 2
                changed[first - 1 : first + (32 << 10) + 1] = False
            changed[: 32 << 10] = False
            tokens[changed] = 1
            assert changed.mean() > 0.9
        tokens.tofile(folder / "train.bin")
        seen.append(prepare(data, BYTE).fingerprint)
    assert seen[0] != seen[1]


def cut_short(path: Path) -> None:
    os.truncate(path, 100)


def overwritten(path: Path) -> None:
    """By as many other bytes."""
    path.write_bytes(bytes(path.stat().st_size))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("kept_open", [256, 0])
@pytest.mark.parametrize("change", [cut_short, overwritten, longer])
def test_tokens_that_change_while_they_are_in_use_are_one_line(
    tmp_path: Path, change: Callable[[Path], None], kept_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory map of a file that is cut short ends the process by SIGBUS instead."""
    monkeypatch.setattr(Shard, "KEPT_OPEN", kept_open)
    path = tmp_path / "train.bin"
    (np.arange(5000) % 99).astype("<u2").tofile(path)
    os.utime(path, ns=(10**18, 10**18))
    shard = Shard(path, raw=True)
    split = TokenSplit([shard], np.array([0, 5000]), np.zeros(1, dtype=np.uint64), 0)
    assert split.take(np.array([4000, 7, 8])).tolist() == [40, 7, 8]
    change(path)
    for read in (lambda: split.read(4000, 10), lambda: split.take(np.array([7, 8]))):
        with pytest.raises(UserError, match=r"train\.bin changed while it was in use"):
            read()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let go of a file that is open")
def test_tokens_that_are_deleted_or_replaced_are_read_on_as_they_were(tmp_path: Path) -> None:
    for change in (Path.unlink, lambda path: (tmp_path / "other").rename(path)):
        (np.arange(5000) % 99).astype("<u2").tofile(tmp_path / "train.bin")
        (tmp_path / "other").write_bytes(b"x")
        shard = Shard(tmp_path / "train.bin", raw=True)
        change(tmp_path / "train.bin")
        assert shard[4000:4003].tolist() == [40, 41, 42]


def test_any_number_of_shards_can_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (np.arange(100)).astype("<u2").tofile(tmp_path / "train.bin")
    monkeypatch.setattr(Shard, "KEPT_OPEN", Shard._n_open + 3)
    before = len(os.listdir("/dev/fd"))
    shards = [Shard(tmp_path / "train.bin", raw=True) for _ in range(50)]
    assert all(shard[10:12].tolist() == [10, 11] for shard in shards)
    assert len(os.listdir("/dev/fd")) <= before + 3
    del shards
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("change", ["os.truncate(path, 1000)", "open(path, 'wb').write(bytes([255]) * 20_000)"])
def test_a_run_whose_tokens_change_ends_with_one_line(tmp_path: Path, change: str) -> None:
    """In a process of its own, which a signal might end."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("train", "val"):
        (np.arange(10_000) % 250).astype("<u2").tofile(folder / f"{name}.bin")
    flags = {"data.source": folder, "data.rows": "random", "tokenizer.kind": "byte", "sample.prompts": [], "steps": 60}
    prelude = f"""
import os
from gptlab.runtime.records.metrics import MetricsLog
from tests.support.corpora import corpus_of
write = MetricsLog.write
def write_and_change(log, kind, **fields):
    write(log, kind, **fields)
    if kind == "train" and fields["step"] == 2:
        path = {str(folder / "train.bin")!r}
        {change}
MetricsLog.write = write_and_change
"""
    process = tiny.start(["train", *tiny.arguments(tmp_path, "run", flags)], prelude=prelude)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2, output
    assert "train.bin changed while it was in use" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_tokens_that_change_behind_their_fingerprint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("train", "val"):
        (np.arange(10_000) % 250).astype("<u2").tofile(folder / f"{name}.bin")
        os.utime(folder / f"{name}.bin", ns=(10**18, 10**18))
    scan = prepare_module.scan

    def changed_behind_it(*arguments: Any) -> Any:
        overwritten(folder / "train.bin")
        return scan(*arguments)

    monkeypatch.setattr(prepare_module, "scan", changed_behind_it)
    data = DataConfig(source=(str(folder),), cache_dir=str(tmp_path / "cache"), rows="random")
    with pytest.raises(UserError, match=r"train\.bin changed while it was in use"):
        prepare(data, BYTE)
    assert cached(folder) == []


def test_tokens_that_are_replaced_while_they_are_hashed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a file that has other tokens: the open one can still be read, and would train under the other's name."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in ("train", "val", "other"):
        (np.arange(10_000) % (99 if name == "other" else 250)).astype("<u2").tofile(folder / f"{name}.bin")
    fingerprint = TokenFiles.fingerprint

    def replaced_before_it(self: TokenFiles, root: Path) -> str:
        (folder / "other.bin").replace(folder / "train.bin")
        return fingerprint(self, root)

    monkeypatch.setattr(TokenFiles, "fingerprint", replaced_before_it)
    data = DataConfig(source=(str(folder),), cache_dir=str(tmp_path / "cache"), rows="random")
    with pytest.raises(UserError, match=r"train\.bin changed while it was read"):
        prepare(data, BYTE)
