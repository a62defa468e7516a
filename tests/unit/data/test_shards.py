"""Shards, the split they make up, and the folders that hold them."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptlab.config.errors import UserError
from gptlab.data.tokens import shards
from gptlab.data.tokens.shards import Shard, SplitWriter, TokenSplit
from gptlab.runtime.files import cache
from gptlab.runtime.files.cache import cache_root, cached_folder, damage


def written(folder: Path, documents: list[list[int]], *, vocab_size: int = 300, bos_id: int | None = 256) -> TokenSplit:
    writer = SplitWriter(folder, "train", vocab_size, bos_id)
    for number, document in enumerate(documents):
        writer.add(np.array(document, dtype=np.int32), n_bytes=len(document), content_hash=number)
    totals = writer.close()
    return TokenSplit.open(folder, "train", n_shards=totals["shards"], n_bytes=totals["bytes"])


def test_a_shard_byte_by_byte(tmp_path: Path) -> None:
    written(tmp_path, [[1, 2], [3]])
    content = (tmp_path / "train_000000.bin").read_bytes()
    assert struct.unpack("<256i", content[:1024]) == (20240520, 1, 5, *[0] * 253)
    assert struct.unpack("<5H", content[1024:]) == (256, 1, 2, 256, 3)


def test_a_large_vocabulary_is_marked_and_kept_as_uint32(tmp_path: Path) -> None:
    split = written(tmp_path, [[70_000, 1]], vocab_size=2**16 + 1, bos_id=65_536)
    content = (tmp_path / "train_000000.bin").read_bytes()
    assert struct.unpack("<3i", content[:12]) == (20240801, 7, 3)
    assert struct.unpack("<3I", content[1024:]) == (65_536, 70_000, 1)
    assert split.read(0, 3).tolist() == [65_536, 70_000, 1]


@pytest.mark.parametrize("per_shard", [1, 2, 3, 7, 8, 9, 100])
def test_shard_borders_cannot_be_seen(tmp_path: Path, per_shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", per_shard)
    split = written(tmp_path, [[1, 2, 3], [], [4], [5, 6]])
    everything = [256, 1, 2, 3, 256, 256, 4, 256, 5, 6]
    assert len(list(tmp_path.glob("*.bin"))) == -(-10 // per_shard)
    assert split.n_tokens == 10
    assert split.n_bytes == 6
    assert split.document_starts.tolist() == [0, 4, 5, 7, 10]
    for start in range(11):
        for length in range(11 - start):
            assert split.read(start, length).tolist() == everything[start : start + length]
    places = np.array([[9, 0, 3], [4, 4, 8]])
    assert split.take(places).tolist() == [[everything[i] for i in row] for row in places]
    assert split.read(2, 3).dtype == split.take(places).dtype == np.int32
    for start, length in ((-1, 2), (9, 2), (11, 0), (3, -1)):
        with pytest.raises(IndexError):
            split.read(start, length)


def test_a_split_without_bos_and_without_documents(tmp_path: Path) -> None:
    assert written(tmp_path, [[1, 2], [3]], bos_id=None).read(0, 3).tolist() == [1, 2, 3]
    empty = written(tmp_path, [])
    assert (empty.n_tokens, empty.n_documents) == (0, 0)


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [[1, 2, 3]])
    good = (tmp_path / "train_000000.bin").read_bytes()
    path = tmp_path / "x.bin"
    wrong = {
        "is not a token shard": [b"", b"hello", bytes(2000), struct.pack("<2i", 20240520, 7) + good[8:]],
        "is damaged": [good[:-1], good + b"\0\0"],
    }
    for message, contents in wrong.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(UserError, match=message):
                Shard(path)


def test_a_shard_that_was_never_closed_is_none(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", 300, 256)
    writer.add(np.arange(100_000, dtype=np.int32) % 256, n_bytes=100_000, content_hash=0)
    with pytest.raises(UserError, match="is not a token shard"):
        Shard(tmp_path / "train_000000.bin")
    writer.close()
    assert len(Shard(tmp_path / "train_000000.bin")) == 100_001


class Builder:
    """Counts how often it built."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> dict[str, Any]:
        self.times += 1
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"a" * 1000)
        (folder / "b").write_bytes(b"b" * 5000)
        return {"times": self.times}


class Recorder:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    warn = line


def test_a_folder_is_built_once_and_in_one_piece(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert cached_folder(tmp_path / "c" / "x", build, what="thing") == {"times": 1}
    assert [p.name for p in (tmp_path / "c").iterdir() if not p.name.endswith(".lock")] == ["x"]
    assert damage(tmp_path / "c" / "x") is None


def spoil(path: Path, content: bytes) -> None:
    path.write_bytes(content)


DAMAGES = {
    "cut short": lambda f: spoil(f / "b", b"b" * 4999),
    "one bit": lambda f: spoil(f / "b", b"b" * 4000 + b"c" + b"b" * 999),
    "gone": lambda f: (f / "inner" / "a").unlink(),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "half a manifest": lambda f: spoil(f / "manifest.json", (f / "manifest.json").read_bytes()[:100]),
    "another manifest": lambda f: spoil(f / "manifest.json", b"[]"),
    "edited manifest": lambda f: spoil(
        f / "manifest.json", (f / "manifest.json").read_bytes().replace(b'"times": 1', b'"times": 7')
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_noticed_named_and_built_again(tmp_path: Path, kind: str) -> None:
    build, console = Builder(), Recorder()
    folder = tmp_path / "x"
    cached_folder(folder, build, what="thing")
    DAMAGES[kind](folder)
    assert damage(folder) is not None
    assert cached_folder(folder, build, what="thing", console=console) == {"times": 2}  # type: ignore[arg-type]
    assert len(console.lines) == 1
    assert "thing" in console.lines[0]
    assert "damaged" in console.lines[0]
    assert damage(folder) is None


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FULL_HASH_BYTES", 2000)
    monkeypatch.setattr(cache, "BLOCK_BYTES", 10)
    cached_folder(tmp_path / "x", Builder(), what="thing")
    recorded = json.loads((tmp_path / "x" / "manifest.json").read_text())["files"]
    assert {name: sorted(entry) for name, entry in recorded.items()} == {
        "b": ["bytes", "sampled_sha256"],
        "inner/a": ["bytes", "sha256"],
    }
    for place, noticed in ((0, True), (4999, True), (15, False)):  # 15 lies between two sampled blocks
        content = bytearray(b"b" * 5000)
        content[place] = 0
        spoil(tmp_path / "x" / "b", bytes(content))
        assert (damage(tmp_path / "x") is not None) == noticed


def test_a_failed_build_leaves_nothing_and_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, Any]:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    def interrupted(folder: Path) -> dict[str, Any]:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(
        UserError, match=r"cannot keep the thing in .* \(set GPTLAB_CACHE to another folder\): No space left on device"
    ):
        cached_folder(tmp_path / "x", full, what="thing")
    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path / "x", interrupted, what="thing")
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="cannot keep the thing"):
        cached_folder(file / "x", Builder(), what="thing")


def test_what_a_killed_builder_left_is_swept_away(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from gptlab.runtime.files.cache import cached_folder\n"
        "def build(folder):\n"
        "    (folder / 'half').write_bytes(b'x')\n"
        "    os._exit(9)\n"
        "cached_folder(pathlib.Path(sys.argv[1]), build, what='thing')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], check=False)
    assert ended.returncode == 9
    assert not (tmp_path / "x").exists()
    assert (tmp_path / ".x.tmp" / "half").exists()
    assert cached_folder(tmp_path / "x", Builder(), what="thing") == {"times": 1}
    assert not (tmp_path / ".x.tmp").exists()
    assert not (tmp_path / "x" / "half").exists()


class Signal:
    """A console that only tells that somebody waits."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def line(self, text: str) -> None:
        assert "waiting" in text
        self._event.set()


def _build_slowly(folder: Path, somebody_waits: Any, builders: Any) -> None:
    def build(temporary: Path) -> dict[str, Any]:
        builders.put(os.getpid())
        assert somebody_waits.wait(timeout=30)
        (temporary / "a").write_bytes(b"a")
        return {"by": os.getpid()}

    cached_folder(folder, build, what="thing", console=Signal(somebody_waits))  # type: ignore[arg-type]


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    somebody_waits, builders = context.Event(), context.Queue()
    both = [context.Process(target=_build_slowly, args=(tmp_path / "x", somebody_waits, builders)) for _ in range(2)]
    for process in both:
        process.start()
    first = builders.get(timeout=30)
    for process in both:
        process.join(timeout=40)
        assert process.exitcode == 0
    assert builders.empty()
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["info"] == {"by": first}


def test_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPTLAB_CACHE", str(tmp_path / "chosen"))
    assert cache_root("here") == Path("here")
    assert cache_root(None) == tmp_path / "chosen"
    monkeypatch.setenv("GPTLAB_CACHE", "~no-such-user/cache")
    with pytest.raises(UserError, match=r"the cache cannot be in '~no-such-user/cache': .* name a folder without ~"):
        cache_root(None)
    monkeypatch.delenv("GPTLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_root(None) == tmp_path / "gptlab"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root(None).parts[-3:] == ("Library", "Caches", "gptlab")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_root(None) == tmp_path / "local" / "gptlab"
