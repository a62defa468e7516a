"""Corpora: the documents of every kind of source, in order, and one clear line for each bad one."""

from __future__ import annotations

import gc
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import sysconfig
import tracemalloc
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import corpus_of

from gptlab.config.errors import UserError
from gptlab.data.corpus import corpus_files as corpus_files_module


def documents(*sources: object, text_column: str = "text") -> list[str]:
    return list(corpus_of(sources, text_column).texts())


def refusal(*sources: object, text_column: str = "text") -> str:
    """The error of opening or reading; it must be one line."""
    with pytest.raises(UserError) as caught:
        documents(*sources, text_column=text_column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def test_stdlib_is_every_library_source_in_the_order_of_hashed_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one package of the real library, which has 31 MB, beside all that does not belong to it."""
    real = Path(sysconfig.get_path("stdlib"))
    assert len(corpus_files_module.stdlib_files()) > 500
    library = tmp_path / "lib"
    shutil.copytree(real / "asyncio", library / "asyncio")
    for name, content in {
        "a.py": b"\xef\xbb\xbfmark = 1", "b.py": b"b = 1\r\n", "site-packages/x.py": b"x", "dist-packages/x.py": b"x",
        "asyncio/site-packages/x.py": b"x", ".hidden/x.py": b"x", ".x.py": b"x", "a.txt": b"x", "empty.py": b"",
        "latin.py": b"\xe9", "null.py": b"\0",
    }.items():  # fmt: skip
        (library / name).parent.mkdir(exist_ok=True)
        (library / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.__getitem__)
    corpus = corpus_of(["stdlib"])
    found = list(corpus.texts())
    expected = {f"asyncio/{path.name}": path.read_bytes().decode() for path in (real / "asyncio").glob("*.py")}
    expected |= {"a.py": "mark = 1", "b.py": "b = 1\r\n"}
    order = sorted((name for name in expected), key=lambda name: hashlib.sha1(name.encode()).hexdigest())
    assert found == [expected[name] for name in order]
    assert len(found) > 20
    assert corpus.last_pass.skipped == {"empty": 1, "not UTF-8 text": 2}
    assert list(corpus.texts()) == found


def test_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n\n ünï\n".encode())
    assert documents(tmp_path / "a.txt") == ["one\r\ntwo\n\n ünï\n"]
    (tmp_path / "README").write_text("no suffix")
    assert documents(tmp_path / "README") == ["no suffix"]


def test_jsonl_may_hold_long_integers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"pi": 3' + "1" * 5000 + ', "text": "x"}\n')
    assert documents(tmp_path / "a.jsonl") == ["x"]


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
    corpus = corpus_of([tmp_path])
    assert list(corpus.texts()) == ["c", "z", "b", "d", "e1", "e2", "f1", "f2"]
    assert corpus.last_pass.skipped == {"not UTF-8 text": 2, "empty": 1}


def test_glob_and_several_sources(tmp_path: Path) -> None:
    for name in ("x1.txt", "x2.txt", "deep/x3.txt", "y.md", "x4.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "x*") == ["x1.txt", "x2.txt"]
    assert documents(tmp_path / "**" / "*.txt") == ["deep/x3.txt", "x1.txt", "x2.txt"]
    assert documents(tmp_path / "y.md", tmp_path / "deep") == ["y.md", "deep/x3.txt"]
    (tmp_path / "[1].txt").write_text("brackets")
    assert documents(tmp_path / "[1].txt") == ["brackets"]


def test_a_glob_reads_a_file_once_however_many_links_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.txt")
    assert documents(tmp_path / "**" / "*.txt") == ["a.txt", "sub/b.txt"]


def test_runs_and_labs_are_no_part_of_a_corpus(tmp_path: Path) -> None:
    """A second run in the same project reads what the first one read, which lies beside its folder by now."""
    written = ("runs/one/config.json", "runs/one/run.json", "runs/one/log.txt", "runs/one/code/model.py",
               "lab/lab.json", "lab/program.md", "lab/experiments/1/config.json", "lab/experiments/1/run.json",
               "lab/experiments/1/log.txt")  # fmt: skip
    for name in ("a.txt", "runs/notes.md", "model/config.json", "model/card.md", *written):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for source in (tmp_path, tmp_path / "**" / "*"):
        corpus = corpus_of([source])
        assert list(corpus.texts()) == ["a.txt", "model/card.md", "runs/notes.md"]
        assert corpus.left_out == "; not read: 2 run or lab folders"
    # One that is named is read.
    assert documents(tmp_path / "runs" / "one") == ["runs/one/code/model.py", "runs/one/log.txt"]
    assert documents(tmp_path / "runs" / "one" / "*.txt") == ["runs/one/log.txt"]
    assert refusal(tmp_path / "runs" / "*" / "*.txt").endswith("(.gz .zst); not read: 1 run or lab folder")


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "*/b.*", "s*/**", "sub/*"])
def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")

    def scandir(path: str) -> object:  # root lists every folder, so no mode refuses it
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    assert refusal(tmp_path / pattern) == f"cannot list the folder {tmp_path / 'sub'}: Permission denied"
    assert documents(tmp_path / "*.txt") == ["a"]


def test_parquet_with_many_row_groups_and_string_types(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    path = write_parquet(tmp_path / "a.parquet", id=list(range(1000)), text=texts)
    assert pq.ParquetFile(path).num_row_groups > 300
    assert documents(path) == texts
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"body": pa.array(["x", None, "", "y"], pa.string()).cast(kind)}), path)
        corpus = corpus_of([path], "body")
        assert list(corpus.texts()) == ["x", "y"]
        assert corpus.last_pass.skipped == {"null": 1, "empty": 1}


def test_jsonl_escapes_and_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "a\\u0000b"}\n{"t": null}\n{"t": "\\ud800"}\n{"t": "\\ud83d\\ude00"}\n')
    corpus = corpus_of([path], "t")
    assert list(corpus.texts()) == ["a\0b", "😀"]
    assert corpus.last_pass.skipped == {"null": 1, "lone surrogate": 1}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\x89PNG\x00\x00", "binary file (a NUL byte at offset 4)"),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 text (byte 0xe9 at offset 3)"),
        ("a.txt", b"x" * 100_000 + b"\xff", "not UTF-8 text (byte 0xff at offset 100000)"),
        ("a.txt", "text".encode("utf-16"), "is UTF-16 text, as its first two bytes say; convert it to UTF-8"),
        ("a.zip", b"x", ".zip is not a format"),
        ("a.txt.bz2", b"x", "(unpack it)"),
        ("a.tar.gz", b"x", "(unpack it)"),
        ("a.parquet.zst", b"x", "(unpack it)"),
        ("a.text-1", b"x", "rename it to a.text-1.txt)"),
        ("a.gz", b"x", "rename it to a.txt.gz)"),
        ("a.json", b"[]", "(make it JSONL"),
        ("a.json.gz", b"x", "(make it JSONL"),
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


def test_two_parquet_columns_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "text", "title"]), path)
    expected = f"{path}: 2 columns are named 'text'; rename them, or choose another one (data.text_column)"
    assert refusal(path) == refusal(tmp_path) == expected
    assert documents(path, text_column="title") == ["c"]


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    assert "did you mean stdlib" in refusal("stdlb")
    assert "no such file or folder" in refusal(tmp_path / "nothing.txt")
    assert "no such file or folder" in refusal("x" * 5000)
    assert "no files to read" in refusal(tmp_path)
    assert "no files to read" in refusal(tmp_path / "*.txt")
    (tmp_path / "a.txt").touch()
    assert "holds no text (1 empty)" in refusal(tmp_path)
    with pytest.raises(UserError, match="name at least one"):
        corpus_of([])


def test_what_a_files_beginning_shows_is_refused_before_the_first_document(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "a.txt").write_bytes(b"\x00")
    write_parquet(tmp_path / "b.parquet", other=["x"])
    (tmp_path / "c.jsonl").write_text("nothing")
    for name in ("a.txt", "b.parquet", "c.jsonl"):
        with pytest.raises(UserError, match=name):
            corpus_of([str(tmp_path / "good.txt"), str(tmp_path / name)]).probe()


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
        return corpus_of(sources, text_column).fingerprint()

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


def test_fingerprint_of_a_single_file_follows_how_it_is_read_and_not_its_name(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "x"}\n', mtime=0)
    names = ("a.jsonl", "b.jsonl", "a.txt", "a.jsonl.gz", "b.jsonl.gz", "a.txt.gz")
    for name in names:
        (tmp_path / name).write_bytes(content)
    jsonl, renamed, text, packed, packed_renamed, packed_text = (
        corpus_of([tmp_path / name]).fingerprint() for name in names
    )
    assert (jsonl, packed) == (renamed, packed_renamed)
    assert len({str(one) for one in (jsonl, text, packed, packed_text)}) == 4


def test_skipped_counts_one_pass(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").touch()
    corpus = corpus_of([str(tmp_path), str(tmp_path)])
    for _ in range(2):
        assert list(corpus.texts()) == ["x", "x"]
        assert corpus.last_pass.skipped == {"empty": 2}


# --- packed files ---


def zst(data: bytes) -> bytes:
    """One frame, as the zstd command makes it."""
    return pa.Codec("zstd").compress(data, asbytes=True)


PACKERS = {".gz": gzip.compress, ".zst": zst}
packed = pytest.mark.parametrize("suffix", PACKERS)


@packed
def test_packed_text_and_jsonl_are_read_as_if_they_were_not(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    lines = '{"text": "one\\n"}\n\n{"text": null}\n{"text": "zwölf", "other": 1}'.encode()
    for name in ("a.jsonl", "b.ndjson", "C.JSONL"):
        path = tmp_path / f"{name}{suffix.upper() if name == 'C.JSONL' else suffix}"
        path.write_bytes(pack(lines))
        corpus = corpus_of([path])
        assert list(corpus.texts()) == ["one\n", "zwölf"]
        assert corpus.last_pass.skipped == {"null": 1}
    text = "\ufeffline\r\n" + "wörd " * 50_000  # a megabyte of two-byte characters: more than one buffer
    for name in ("d.txt", "e.md", "f.py"):
        path = tmp_path / (name + suffix)
        path.write_bytes(pack(text.encode()))
        assert documents(path) == [text[1:]]


@packed
def test_packed_files_are_found_in_folders_and_by_globs(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    contents = {"a.jsonl": b'{"text": "a"}', "deep/b.txt": b"b", "c.tar": b"c", "d.parquet": b"d", "e": b"e"}
    for name, content in contents.items():
        path = tmp_path / (name + suffix)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pack(content))
    (tmp_path / f"binary.txt{suffix}").write_bytes(pack(b"\0"))
    (tmp_path / f".hidden.txt{suffix}").write_bytes(pack(b"hidden"))
    corpus = corpus_of([tmp_path])
    assert list(corpus.texts()) == ["a", "b"]
    assert corpus.last_pass.skipped == {"not UTF-8 text": 1}
    assert documents(tmp_path / "**" / f"*{suffix}") == ["a", "b"]
    assert documents(tmp_path / f"*.jsonl{suffix}") == ["a"]
    for name in ("c.tar", "d.parquet", "e"):
        assert "is not a format gptlab reads" in refusal(tmp_path / (name + suffix))
        assert name + suffix in refusal(tmp_path / (name + suffix))


@packed
def test_joined_members_and_frames_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    """`cat a.gz b.gz`, parallel packers and appended logs make such files; a line may go across a seam."""
    pack = PACKERS[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    documents_in = [f"{i} " * (1 + i % 7 * 1000) for i in range(300)]
    data = "".join(json.dumps({"text": text}) + "\n" for text in documents_in).encode()
    generator = random.Random(1)
    cuts = sorted(generator.sample(range(len(data)), 50))
    parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    path.write_bytes(b"".join(pack(part) + pack(b"") for part in parts))
    assert documents(path) == documents_in


@packed
def test_a_packed_file_that_ends_early_is_an_error(tmp_path: Path, suffix: str) -> None:
    """At every length but those at which a member ends; in a folder, too, where other files that are no text are passed
    over."""
    pack = PACKERS[suffix]
    first, second = pack(b'{"text": "first"}\n'), pack(b'{"text": "second"}\n')
    path = tmp_path / f"a.jsonl{suffix}"
    for length in range(1, len(first + second)):
        path.write_bytes((first + second)[:length])
        if length == len(first):
            assert documents(path) == ["first"]
        else:
            assert f"a.jsonl{suffix} is damaged or no {suffix} file: " in refusal(path)
            assert "is damaged" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "is empty" in refusal(path)
    path.write_bytes(pack(b""))
    assert "holds no text" in refusal(path)


@packed
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_damaged_packed_files_get_one_line(tmp_path: Path, suffix: str, name: str) -> None:
    pack = PACKERS[suffix]
    generator = random.Random(1)
    document = json.dumps({"text": "".join(generator.choices("abcdefgh ", k=300_000))})
    whole = pack(document.encode())
    path = tmp_path / (name + suffix)
    damages = [
        document.encode(),  # not packed at all
        whole + b"garbage",
        whole[: len(whole) // 2],
        *([whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]] if suffix == ".gz" else []),  # its checksum
        whole[:10] + b"\xff" * 10 + whole[20:],  # where both formats say what block follows
        PACKERS[".zst" if suffix == ".gz" else ".gz"](document.encode()),  # packed otherwise
    ]
    for damage in damages:
        path.write_bytes(damage)
        for source in (path, tmp_path):
            assert f"{name}{suffix} is damaged or no {suffix} file: " in refusal(source)


@packed
def test_bad_contents_of_packed_files_are_named_as_in_others(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    for name, content, expected in (
        ("a.jsonl", b'{"text": "x"}\n{"texts": "y"}\n', f"a.jsonl{suffix}:2: no key 'text'"),
        ("a.jsonl", b"\xff\n", f"a.jsonl{suffix}:1: not UTF-8"),
        ("a.txt", b"caf\xe9 au lait", f"a.txt{suffix} is not UTF-8 text (byte 0xe9 at offset 3)"),
        ("a.txt", b"\x89PNG\0", f"a.txt{suffix} is a binary file"),
    ):
        (tmp_path / (name + suffix)).write_bytes(pack(content))
        assert expected in refusal(tmp_path / (name + suffix))
    assert "no such file" in refusal(tmp_path / f"nothing.txt{suffix}")
    (tmp_path / f"folder.txt{suffix}").mkdir()
    assert "no files to read" in refusal(tmp_path / f"folder.txt{suffix}")


@packed
def test_what_unpacks_to_far_more_does_not_fill_memory(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 MB from 80 kB (gzip) or less: many lines are streamed, one line without an end is refused."""
    monkeypatch.setattr(corpus_files_module, "MAX_DOCUMENT_BYTES", 1 << 22)
    pack = PACKERS[suffix]
    line = b'{"text": "' + b"x" * 10_000 + b'"}\n'
    lines, bomb, text = (tmp_path / f"{name}{suffix}" for name in ("lines.jsonl", "bomb.jsonl", "bomb.txt"))
    lines.write_bytes(pack(line * 200) * 40)
    bomb.write_bytes(pack(bytes(2_000_000)) * 40)
    text.write_bytes(pack(b"x" * 2_000_000) * 40)
    tracemalloc.start()
    unpacked_before = pa.total_allocated_bytes()
    try:
        assert sum(len(document) for document in corpus_of([lines]).texts()) == 80_000_000
        assert "bomb.jsonl" in (message := refusal(bomb))
        assert "more than 4,194,304 bytes without a line end" in message
        assert "unpacks to more than 4,194,304 bytes" in refusal(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000
    assert pa.total_allocated_bytes() - unpacked_before < 10_000_000


def test_packed_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zst(b'{"text": "x"}\n' * 1000))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        reader = corpus_of([path]).texts()
        assert next(reader) == "x"
        reader.close()
        gc.collect()


def test_fingerprint_of_a_packed_file_follows_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x", "other": "y"}\n', mtime=0))
    assert corpus_of([path], "text").fingerprint() != corpus_of([path], "other").fingerprint()


# --- Parquet ---


def test_several_parquet_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        texts = [None if row % 5 == 3 else f"{number}-{row}" for row in range(10)]
        write_parquet(tmp_path / f"train-{number:05}.parquet", text=texts, title=["title"] * 10)
    corpus = corpus_of([tmp_path])
    assert list(corpus.texts()) == [f"{n}-{row}" for n in range(3) for row in range(10) if row % 5 != 3]
    assert corpus.last_pass.skipped == {"null": 6}
    assert documents(tmp_path / "train-*1.parquet", text_column="title") == ["title"] * 10
    write_parquet(tmp_path / "train-00003.parquet", title=["no text"])
    assert "train-00003.parquet: no column 'text'" in refusal(tmp_path)  # before anything is read


STRING_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
]


@pytest.mark.parametrize("kind", STRING_TYPES, ids=str)
def test_parquet_string_types_across_row_groups(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["ä", None, "b", "", None, "b", "ä", "日本"]
    table = pa.table({"text": pa.chunked_array([pa.array(texts[:3], kind), pa.array(texts[3:], kind)])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 4
    corpus = corpus_of([str(tmp_path / "a.parquet")])
    assert list(corpus.texts()) == ["ä", "b", "b", "ä", "日本"]
    assert corpus.last_pass.skipped == {"null": 2, "empty": 1}


def test_parquet_columns_that_are_no_strings_are_refused(tmp_path: Path) -> None:
    columns = {
        "list": pa.array([["a"], ["b"]]),
        "struct": pa.array([{"text": "a"}, {"text": "b"}]),
        "binary": pa.array([b"a", b"b"]),
        "number": pa.array([1, 2]),
        "null": pa.array([None, None]),
        "numbers in a dictionary": pa.array([1, 2]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column in columns:
        message = refusal(tmp_path / "a.parquet", text_column=column)
        assert f"a.parquet: column '{column}' holds " in message
        assert "not strings" in message
    assert "no column 'struct.text'" in refusal(tmp_path / "a.parquet", text_column="struct.text")


def test_a_parquet_column_is_that_of_exactly_its_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", **{"text.de": ["ja"], "text": ["yes"], "Text": ["YES"]})
    for column, expected in {"text": "yes", "text.de": "ja", "Text": "YES"}.items():
        assert documents(path, text_column=column) == [expected]
    path = write_parquet(tmp_path / "b.parquet", **{"meta": [{"text": "inner"}], "meta.text": ["outer"]})
    assert documents(path, text_column="meta.text") == ["outer"]
