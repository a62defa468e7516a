"""Corpora: the documents of every kind of source, in order, and one clear line for each bad one."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptlab.config.errors import UserError
from gptlab.data import corpus as corpus_module
from gptlab.data.corpus import open_corpus


def documents(*sources: object, text_column: str = "text") -> list[str]:
    return list(open_corpus([str(source) for source in sources], text_column).documents())


def refusal(*sources: object, text_column: str = "text") -> str:
    """The error of opening or reading; it must be one line."""
    with pytest.raises(UserError) as caught:
        documents(*sources, text_column=text_column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def test_stdlib_is_every_library_source_in_the_order_of_hashed_paths() -> None:
    corpus = open_corpus(["stdlib"])
    found = list(corpus.documents())
    root = Path(sysconfig.get_path("stdlib"))
    expected: list[tuple[str, str]] = []
    skipped = {"empty": 0, "not UTF-8 text": 0}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "__pycache__"} & set(parts) or any(
            part.startswith(".") for part in parts
        ):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text or not text:
            skipped["not UTF-8 text" if text else "empty"] += 1
        else:
            expected.append((hashlib.sha1("/".join(parts).encode()).hexdigest(), text))
    assert found == [text for _, text in sorted(expected)]
    assert corpus.skipped == {reason: count for reason, count in skipped.items() if count}
    assert len(found) > 100
    assert list(corpus.documents()) == found


def test_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n\n ünï\n".encode())
    assert documents(tmp_path / "a.txt") == ["one\r\ntwo\n\n ünï\n"]
    (tmp_path / "README").write_text("no suffix")
    assert documents(tmp_path / "README") == ["no suffix"]


def test_folder_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    for name, text in {"b.txt": "b", "a/z.md": "z", "a/c.py": "c", "d.TXT": "d", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "e.jsonl").write_text('{"text": "e1"}\n\n{"text": "e2", "other": 1}\n')
    write_parquet(tmp_path / "f.parquet", text=["f1", "f2"])
    for left_out in ("image.png", ".hidden.txt", "__pycache__/x.py", ".git/y.py"):
        (tmp_path / left_out).parent.mkdir(exist_ok=True)
        (tmp_path / left_out).write_text("left out")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    corpus = open_corpus([str(tmp_path)])
    assert list(corpus.documents()) == ["c", "z", "b", "d", "e1", "e2", "f1", "f2"]
    assert corpus.skipped == {"not UTF-8 text": 2, "empty": 1}


def test_glob_and_several_sources(tmp_path: Path) -> None:
    for name in ("x1.txt", "x2.txt", "deep/x3.txt", "y.md", "x4.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "x*") == ["x1.txt", "x2.txt"]
    assert documents(tmp_path / "**" / "*.txt") == ["deep/x3.txt", "x1.txt", "x2.txt"]
    assert documents(tmp_path / "y.md", tmp_path / "deep") == ["y.md", "deep/x3.txt"]
    (tmp_path / "[1].txt").write_text("brackets")
    assert documents(tmp_path / "[1].txt") == ["brackets"]


def test_parquet_with_many_row_groups_and_string_types(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    path = write_parquet(tmp_path / "a.parquet", id=list(range(1000)), text=texts)
    assert pq.ParquetFile(path).num_row_groups > 300
    assert documents(path) == texts
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"body": pa.array(["x", None, "", "y"], pa.string()).cast(kind)}), path)
        corpus = open_corpus([str(path)], "body")
        assert list(corpus.documents()) == ["x", "y"]
        assert corpus.skipped == {"null": 1, "empty": 1}


def test_jsonl_escapes_and_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "a\\u0000b"}\n{"t": null}\n{"t": "\\ud800"}\n{"t": "\\ud83d\\ude00"}\n')
    corpus = open_corpus([str(path)], "t")
    assert list(corpus.documents()) == ["a\0b", "😀"]
    assert corpus.skipped == {"null": 1, "lone surrogate": 1}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\x89PNG\x00\x00", "binary file (a NUL byte at offset 4)"),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 text (byte 0xe9 at offset 3)"),
        ("a.txt", b"x" * 100_000 + b"\xff", "not UTF-8 text (byte 0xff at offset 100000)"),
        ("a.zip", b"x", ".zip is not a format"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"\n\n", "holds no text"),
        ("a.jsonl", b'{"text": "x"}\n[1, 2]\n', "a.jsonl:2: a JSON list, not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"texts": "y"}\n', "a.jsonl:2: no key 'text'; keys there: texts; nearest: texts"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: 'text' holds a int"),
        ("a.jsonl", b"\xff\n", "a.jsonl:1: not UTF-8"),
        ("a.jsonl", b"[" * 200_000, "a.jsonl:1: not JSON"),
        ("a.parquet", b"PAR1 no", "cannot read"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert expected in message
    assert name in message


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", texts=["x"], id=[1])
    assert "no column 'text'; columns there: texts, id; nearest: texts" in refusal(path)
    assert "column 'id' holds int64" in refusal(path, text_column="id")
    assert "no column" in refusal(tmp_path)  # in a folder, too
    empty = write_parquet(tmp_path / "b.parquet", text=pa.array([], pa.string()))
    assert "holds no text" in refusal(empty)
    whole = write_parquet(tmp_path / "c.parquet", text=[f"{i} " * 500 for i in range(100)]).read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[:200] + bytes(2000) + whole[2200:])
    assert "c.parquet" in refusal(tmp_path / "c.parquet")


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    assert "did you mean stdlib" in refusal("stdlb")
    assert "no such file or folder" in refusal(tmp_path / "nothing.txt")
    assert "no such file or folder" in refusal("x" * 5000)
    assert "no files to read" in refusal(tmp_path)
    assert "no files to read" in refusal(tmp_path / "*.txt")
    (tmp_path / "a.txt").touch()
    assert "holds no text (1 empty)" in refusal(tmp_path)
    with pytest.raises(UserError, match="name at least one"):
        open_corpus([])


def test_what_a_files_beginning_shows_is_refused_before_reading(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x00")
    write_parquet(tmp_path / "b.parquet", other=["x"])
    (tmp_path / "c.jsonl").write_text("nothing")
    for name in ("a.txt", "b.parquet", "c.jsonl"):
        with pytest.raises(UserError):
            open_corpus([str(tmp_path / name)])


def test_probe_allows_a_character_across_its_end(tmp_path: Path) -> None:
    text = "x" * ((1 << 16) - 1) + "é"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert documents(tmp_path / "a.txt") == [text]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    assert "cannot read" in refusal(tmp_path / "a.txt")


def test_fingerprint_follows_content_names_and_order(tmp_path: Path) -> None:
    def fingerprint(*sources: object, text_column: str = "text") -> str:
        return open_corpus([str(source) for source in sources], text_column).fingerprint()

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "a.txt").write_text("hello")
        (folder / "b.jsonl").write_text(json.dumps({"text": "x", "other": "y"}))
    original = fingerprint(one)
    assert original == fingerprint(one) == fingerprint(two)  # wherever the corpus lies
    assert original != fingerprint(one, text_column="other")
    status = (two / "a.txt").stat()
    (two / "a.txt").write_text("hellO")
    os.utime(two / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert original != fingerprint(two)  # same size and time
    (two / "a.txt").rename(two / "c.txt")
    (two / "c.txt").write_text("hello")
    assert original != fingerprint(two)
    assert fingerprint(one, two) != fingerprint(two, one)
    assert fingerprint("stdlib") == fingerprint("stdlib") != original


def test_fingerprint_of_a_very_large_file_sees_its_ends_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "WHOLE_HASH_BYTES", 5000)
    monkeypatch.setattr(corpus_module, "END_BYTES", 1000)
    path = tmp_path / "a.txt"
    seen = set()
    for at, time_ns in ((None, 1), (0, 1), (9999, 1), (5000, 2)):
        data = bytearray(b"x" * 10_000)
        if at is not None:
            data[at] = ord("y")
        path.write_bytes(data)
        os.utime(path, ns=(time_ns, time_ns))
        seen.add(open_corpus([str(path)]).fingerprint())
    assert len(seen) == 4


def test_skipped_counts_one_pass(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").touch()
    corpus = open_corpus([str(tmp_path), str(tmp_path)])
    for _ in range(2):
        assert list(corpus.documents()) == ["x", "x"]
        assert corpus.skipped == {"empty": 2}
