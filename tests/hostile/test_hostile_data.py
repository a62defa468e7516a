"""Untrusted texts, tokens, tokenizers, caches, task files and configurations: refused in one line, at once."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import corpus_of
from hostile_files import ANY_FILE, ANY_JSON, endless, hole, pipe, posix_only, refuse
from tiny_runs import write_bundle

from gptlab.config.errors import UserError, nearest_name, one_line
from gptlab.config.load import apply_overrides
from gptlab.config.run import RunConfig
from gptlab.data.corpus.known_corpora import (
    HubFiles,
    HubRecord,
    RemoteFile,
    Verified,
    read_record,
    record_path,
    write_record,
)
from gptlab.data.tokenizer.tokenizer import ByteTokenizer, load_tokenizer, read_character_table
from gptlab.data.tokens.foreign_files import find_token_files
from gptlab.data.tokens.shards import Shard, TokenSplit, is_shard, load_array, shard_name
from gptlab.eval.core_bundle import unpack
from gptlab.eval.core_tasks import read_tasks
from gptlab.runtime.files.cache import cached_folder, damage, is_inside, read_info
from gptlab.runtime.files.plain_file import load_toml

pytestmark = [posix_only, pytest.mark.timeout(60)]
Harm = Callable[[Path], None]

OUTSIDE = ["../x", "a/../../x", "/etc/hostname", "..", "", "a//b", "./a", "a\\..\\b", "C:x", "a\0b"]


def test_names_that_lead_outside() -> None:
    assert [is_inside(name) for name in OUTSIDE] == [False] * len(OUTSIDE)
    assert all(map(is_inside, ["a", "a/b.parquet", "..a", "a..b/...", "data/x-00000-of-00001.parquet"]))


# --- configurations ---------------------------------------------------------------------------------------------------

TOML: dict[str, tuple[bytes, str]] = {
    "deep lists": (b"a = " + b"[" * 10_000, "nested too deep"),
    "deep tables": (b"a = " + b"{b = " * 2_500, "nested too deep"),
    "a name of many dots": (b"a" + b".a" * 8_000 + b" = 1", "nested too deep"),
    "a table of many dots": (b"[a" + b".a" * 8_000 + b"]\nx = 1", "nested too deep"),
    "a name of many strings": (b"'a'" + b" . 'a'" * 1_500 + b" = 1", "nested too deep"),
    "many dots after quotes that end a string": (b'x = ["""a"""", {a' + b".a" * 8_000 + b" = 1}]", "nested too deep"),
    "many dots after a comment": (b"# '\na" + b".a" * 8_000 + b" = 1", "nested too deep"),
    "many digits": (b"seed = " + b"9" * 16_000, "is not TOML"),
    "17 kB": (b"#" * 17_000, "are more than the 16,384 that it can have"),
    "no UTF-8": (b"\xff\xfe", "is not TOML"),
}


@pytest.mark.parametrize("kind", TOML)
def test_toml(tmp_path: Path, kind: str) -> None:
    content, says = TOML[kind]
    (tmp_path / "x.toml").write_bytes(content)
    refuse(lambda: load_toml(tmp_path / "x.toml"), says, trace=len(content) < 10_000)


@pytest.mark.parametrize("harm", ANY_FILE, ids=lambda f: f.__name__)
def test_toml_that_is_no_file(tmp_path: Path, harm: Harm) -> None:
    harm(tmp_path / "x.toml")
    refuse(lambda: load_toml(tmp_path / "x.toml"), "cannot read")


@pytest.mark.parametrize(
    "overrides",
    [
        {"batch.total_tokens": 10**30}, {"horizon.amount": 10**400}, {"seed": -(10**30)}, {"model.n_layer": 10**9},
        {"model.n_embd": 10**12, "model.n_head": 7}, {"x" * 1_000_000: 1}, {"model." + "n" * 1_000_000: 1},
        {"data.rows": "p" * 10_000_000},
    ],
    ids=lambda overrides: str(overrides)[:40],
)  # fmt: skip
def test_absurd_fields(overrides: dict[str, Any]) -> None:
    refuse(lambda: apply_overrides(RunConfig(), overrides), trace=False)


def test_a_message_can_neither_fill_nor_steer_a_terminal() -> None:
    assert one_line(UserError("a\n b\x1b[2J\x07\x9b\u202e" + "x" * 10_000)).startswith("a b�[2J���x")
    assert len(one_line(UserError("x" * 10_000_000))) == 2000
    assert one_line(UserError("é → 漢字 is fine")) == "é → 漢字 is fine"
    assert nearest_name("x" * 1_000_000, ["x" * 1_000_000] * 100) is None


# --- caches -----------------------------------------------------------------------------------------------------------


def cache(folder: Path, **changes: Any) -> Path:
    """A cache folder with an untrusted manifest: `changes` to its files, under a seal that fits."""
    from gptlab.runtime.files.plain_file import json_sha256

    def build(temporary: Path) -> dict[str, Any]:
        (temporary / "x.bin").write_bytes(b"tokens")
        return {"n": 1}

    if not folder.exists():
        cached_folder(folder, build, what="x")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"] |= changes
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": json_sha256(manifest)}))
    return folder


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_files_elsewhere(tmp_path: Path, name: str) -> None:
    folder = cache(tmp_path / "c", **{name: {"bytes": 1, "sha256": "0" * 64}})
    assert damage(folder) == f"{name!r} is not a file of its own"


@pytest.mark.parametrize("harm", [pipe, endless], ids=lambda f: f.__name__)
def test_a_manifest_over_what_is_no_file(tmp_path: Path, harm: Harm) -> None:
    folder = cache(tmp_path / "c")
    harm(folder / "x.bin")
    assert damage(folder) == "'x.bin' is not a file of its own"


@pytest.mark.parametrize("harm", ANY_JSON, ids=lambda f: f.__name__)
def test_a_manifest_that_is_none(tmp_path: Path, harm: Harm) -> None:
    folder = cache(tmp_path / "c")
    harm(folder / "manifest.json")
    assert str(damage(folder)).startswith("manifest.json cannot be read")
    refuse(lambda: read_info(folder), "manifest.json")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


ARRAYS: dict[str, bytes] = {
    "more than there is": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }", bytes(8)),
    "more than can be": npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({10**22},), }}", bytes(8)),
    "less than nothing": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", bytes(8)),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80\x04N."),
    "another type": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
    "a table": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1), }", bytes(8)),
    "a call": npy("{'descr': __import__('os').system('touch it-ran'), 'shape': (1,), }", bytes(8)),
    "deep": npy("(" * 100, bytes(8)),
    "a zip archive": b"PK\x03\x04" + bytes(100),
    "a pickle": b"cposix\nsystem\n(S'touch it-ran'\ntR.",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npy").write_bytes(ARRAYS[kind])
    refuse(lambda: load_array(tmp_path / "x.npy", np.dtype("<i8")), "x.npy", max_bytes=1 << 20)
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("harm", ANY_FILE, ids=lambda f: f.__name__)
def test_arrays_that_are_no_file(tmp_path: Path, harm: Harm) -> None:
    harm(tmp_path / "x.npy")
    refuse(lambda: load_array(tmp_path / "x.npy", np.dtype("<i8")), "x.npy")


@pytest.mark.parametrize("starts", [[0, 9, 3, 6], [-5, 0, 6], [0, 2**62, 6], [0, 5]])
def test_documents_that_overlap_or_lie_outside(starts: list[int]) -> None:
    hashes = np.zeros(len(starts) - 1, dtype=np.uint64)
    tokens = [np.arange(6, dtype=np.uint16)]
    refuse(lambda: TokenSplit(tokens, np.array(starts), hashes, 1), "do not belong together", max_bytes=1 << 20)


@pytest.mark.parametrize("count", [0, -1])
def test_a_split_of_no_shards(tmp_path: Path, count: int) -> None:
    refuse(lambda: TokenSplit.open(tmp_path, "train", n_shards=count, n_bytes=1), "is damaged: it counts")
    refuse(lambda: TokenSplit.open(tmp_path, "train", n_shards=10**12, n_bytes=1), shard_name("train", 0))


# --- tokens of others -------------------------------------------------------------------------------------------------


def shard(n_tokens: int, data: bytes = b"") -> bytes:
    return struct.pack("<iii", 20240520, 1, n_tokens).ljust(1024, b"\0") + data


@pytest.mark.parametrize("n_tokens", [2**31 - 1, -1, -(2**31), 3])
def test_shards_that_claim_other_lengths(tmp_path: Path, n_tokens: int) -> None:
    (tmp_path / "x.bin").write_bytes(shard(n_tokens, bytes(4)))
    refuse(lambda: Shard(tmp_path / "x.bin"), "is damaged: its header says", max_bytes=1 << 20)


@pytest.mark.parametrize("harm", [pipe, endless], ids=lambda f: f.__name__)
def test_tokens_that_are_no_file(tmp_path: Path, harm: Harm) -> None:
    path = tmp_path / "x.bin"
    harm(path)
    assert not is_shard(path)
    for raw in (True, False):
        refuse(lambda raw=raw: Shard(path, raw=raw), "not a regular file")  # type: ignore[misc]
    refuse(lambda: find_token_files([str(path)], [], None, tmp_path), "not a regular file")
    harm(tmp_path / "meta.pkl")
    refuse(lambda: read_character_table(tmp_path / "meta.pkl"), "not a regular file")


# --- texts ------------------------------------------------------------------------------------------------------------


def documents(path: Path, **options: Any) -> list[str]:
    return list(corpus_of([path], **options).texts())


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet", "x.txt.gz", "x.jsonl.zst"])
@pytest.mark.parametrize("harm", [pipe, endless], ids=lambda f: f.__name__)
def test_texts_that_are_no_file(tmp_path: Path, name: str, harm: Harm) -> None:
    harm(tmp_path / name)
    refuse(lambda: documents(tmp_path / name), name)


def test_a_folder_of_pipes_and_devices_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    for name, harm in (("a.txt", pipe), ("b.md", endless), ("c.py", pipe)):
        harm(tmp_path / name)
    corpus = corpus_of([tmp_path])
    assert list(corpus.texts()) == ["text"]
    assert corpus.last_pass.skipped == {"unreadable": 3}


def test_a_text_with_a_hole(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x" * (1 << 17))
    os.truncate(tmp_path / "x.txt", 1 << 40)
    refuse(lambda: documents(tmp_path / "x.txt"), "a text file is one document", max_bytes=1 << 21)


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.txt.zst", "x.jsonl.zst"])
def test_bombs(tmp_path: Path, name: str) -> None:
    """Half a gigabyte of one letter in half a megabyte or less: found out after a hundred MB of it at most."""
    piece = b"x" * (1 << 24)
    packed = gzip.compress(piece) if name.endswith("gz") else pa.compress(piece, "zstd", asbytes=True)
    (tmp_path / name).write_bytes((gzip.compress(b'"') if name.endswith("gz") else b"") + packed * 32)
    refuse(lambda: documents(tmp_path / name), name, trace=False)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"text": ' * 100_000, "not JSON"),
        (b'{"text": ' + b"9" * 100_000 + b"}", "holds a int"),
        (b'{"text": [1]}', "holds a list"),
        (b'{"' + b"x" * 1_000_000 + b'": 1}', "no key 'text'"),
        (b"{" + b",".join(b'"%d": 1' % i for i in range(50_000)) + b"}", "no key 'text'"),
        (b'{"\\u001b[2J": 1}', "no key 'text'"),
    ],
    ids=["deep list", "deep object", "digits", "a list", "a long key", "many keys", "a key that steers"],
)
def test_lines(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    refuse(lambda: documents(tmp_path / "x.jsonl"), says)


PARQUET = [b"PAR1" * 100, b"PAR1" + b"\xff" * 1000 + struct.pack("<I", 2**31 - 1) + b"PAR1"]


@pytest.mark.parametrize("column", ["text", "other"])
def test_parquet_with_a_column_whose_name_is_no_text(tmp_path: Path, column: str) -> None:
    """The name stands in the footer, where nothing says that it is UTF-8."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a"], "naXme": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"naXme", b"na\xefme"))
    line = refuse(lambda: documents(path, text_column=column), "a column's name is not UTF-8")
    assert "x.parquet" in line


@pytest.mark.parametrize("content", PARQUET, ids=["no footer", "a footer of 2 GB"])
def test_parquet_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    before = pa.total_allocated_bytes()
    refuse(lambda: documents(tmp_path / "x.parquet"), "Parquet")
    assert pa.total_allocated_bytes() - before < 1 << 20


# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    ByteTokenizer().save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


SPLIT = {"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": "\\p{N}{1,3}"}}]}
TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no vocabulary": lambda content: content["model"].pop("vocab"),
    "a vocabulary that is a list": lambda content: content["model"].update(vocab=[1]),
    "ids of every type": lambda content: content.update(
        pre_tokenizer=None, model=content["model"] | {"vocab": {"a": 1, "b": "x", "c": []}}
    ),
    "an id beyond all": lambda content: content["model"]["vocab"].update(a=10**4000),
    "merges of nothing": lambda content: content.update(
        pre_tokenizer=SPLIT, model=content["model"] | {"merges": [["ab" * 100_000, "c"]]}
    ),
    "merges that are no pairs": lambda content: content.update(
        pre_tokenizer=SPLIT, model=content["model"] | {"merges": [1, [], {}]}
    ),
    "a pattern that backtracks": lambda content: content.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": "(a+)+$\\p{N}{1,9999}"}}]}
    ),
    "a normalizer": lambda content: content.update(normalizer={"type": "Replace", "content": "x" * 100_000}),
    "an added token": lambda content: content.update(added_tokens=[{"content": "x" * 1_000_000}]),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(tmp_path: Path, kind: str) -> None:
    folder = tokenizer(tmp_path, TOKENIZERS[kind])
    refuse(lambda: load_tokenizer(folder), "is neither a tokenizer that gptlab wrote nor GPT-2's: its ")


@pytest.mark.parametrize(
    "harm",
    [harm for harm in ANY_JSON if harm.__name__ not in ("not_a_number", "twice", "less_deep")],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers_that_are_no_file(tmp_path: Path, name: str, harm: Harm) -> None:
    ByteTokenizer().save(tmp_path)
    harm(tmp_path / name)
    refuse(lambda: load_tokenizer(tmp_path), str(tmp_path) if harm in ANY_FILE else name)


@pytest.mark.parametrize("kind", ["wide", "deep"])
def test_a_tokenizer_of_megabytes_of_brackets(tmp_path: Path, kind: str) -> None:
    content = b"[" * (1 << 24) if kind == "deep" else b'{"a": [' + b"[]," * 10_000_000 + b"[]]}"
    (tmp_path / "tokenizer.json").write_bytes(content)
    refuse(lambda: load_tokenizer(tmp_path), "more lists than a tokenizer has merges")


# --- records of the hub -----------------------------------------------------------------------------------------------

PLACE = HubFiles(repo="a/b")


def record(root: Path, name: str = "x.txt", **changes: Any) -> HubRecord | None:
    (root / "snapshot").mkdir(exist_ok=True)
    (root / "snapshot" / "x.txt").write_text("text")
    whole = HubRecord(
        "a/b", None, "c" * 40, str(root / "snapshot"),
        files={name: RemoteFile(4, None, "b" * 40)}, verified={name: Verified(hashlib.sha256(b"text").hexdigest(), 1)},
    )  # fmt: skip
    write_record(PLACE, whole, root)
    path = record_path(PLACE, root)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return read_record(PLACE, root)


def test_a_record_of_a_stranger_counts_for_nothing(tmp_path: Path) -> None:
    good = record(tmp_path)
    assert good is not None
    assert good.local("x.txt", tmp_path) is not None
    for name in OUTSIDE:
        assert record(tmp_path, name) is None, name
    for changes in ({"folder": 1}, {"commit": []}, {"files": {"x": {"n_bytes": "4", "sha256": None, "blob_id": ""}}},
                    {"verified": {"x.txt": {"sha256": "zz", "mtime_ns": 1}}}, {"more": 1}, {"files": []}):  # fmt: skip
        assert record(tmp_path, **changes) is None, changes


@pytest.mark.parametrize("harm", ANY_JSON, ids=lambda f: f.__name__)
def test_a_record_that_is_none(tmp_path: Path, harm: Harm) -> None:
    record(tmp_path)
    harm(record_path(PLACE, tmp_path))
    assert read_record(PLACE, tmp_path) is None


# --- CORE -------------------------------------------------------------------------------------------------------------


def tasks(line: str) -> str:
    return f"icl_tasks:\n- {{label: pick, icl_task_type: multiple_choice, {line}}}\n"


DOUBLED = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
BUNDLES: dict[str, tuple[str, str | bytes, str]] = {
    "aliases": ("core.yaml", f"a0: &a0 x\n{DOUBLED}icl_tasks: *a59\n", "has aliases"),
    "merged aliases": ("core.yaml", "a: &a {x: 1}\nicl_tasks: {<<: [*a, *a]}\n", "has aliases"),
    "deep": ("core.yaml", "[" * 20_000, "nested too deep"),
    "65 kB": ("core.yaml", "#" * 66_000, "are more than"),
    "an object of Python": ("core.yaml", "icl_tasks: !!python/object/apply:os.system ['touch it-ran']", "core.yaml"),
    "a path outside": ("core.yaml", tasks("dataset_uri: ../../x, num_fewshot: [0]"), "leads out of eval_data"),
    "a path from the root": (
        "core.yaml",
        tasks("dataset_uri: /etc/passwd, num_fewshot: [0]"),
        "leads out of eval_data",
    ),
    "no path": ("core.yaml", tasks("dataset_uri: [1], num_fewshot: [0]"), "core.yaml"),
    "fewer than no examples": ("core.yaml", tasks("dataset_uri: a/pick.jsonl, num_fewshot: [-1]"), "num_fewshot is -1"),
    "endless examples": ("core.yaml", tasks("dataset_uri: a/pick.jsonl, num_fewshot: [1.0e+300]"), "too few"),
    "infinite examples": ("core.yaml", tasks("dataset_uri: a/pick.jsonl, num_fewshot: [.inf]"), "core.yaml is damaged"),
    "a table of one long field": (
        "eval_meta_data.csv",
        "Eval Task,Random baseline\n" + "x" * 200_000,
        "eval_meta_data.csv",
    ),
    "a table of a megabyte": ("eval_meta_data.csv", "x" * 1_100_000, "are more than"),
    "a deep line": ("eval_data/a/pick.jsonl", "[" * 100_000, "pick.jsonl"),
    "a line of digits": ("eval_data/a/pick.jsonl", "9" * 100_000, "pick.jsonl"),
}


@pytest.mark.parametrize("kind", BUNDLES)
def test_task_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, says = BUNDLES[kind]
    bundle = write_bundle(tmp_path / "core")
    (bundle / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(lambda: read_tasks(bundle), says, trace=len(content) < 10_000)
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("harm", ANY_FILE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["core.yaml", "eval_meta_data.csv", "eval_data/a/pick.jsonl"])
def test_task_files_that_are_none(tmp_path: Path, name: str, harm: Harm) -> None:
    bundle = write_bundle(tmp_path / "core")
    harm(bundle / name)
    refuse(lambda: read_tasks(bundle), name)


@pytest.mark.parametrize("kind", ["one large file", "many files"])
def test_a_bundle_that_unpacks_to_far_more(tmp_path: Path, kind: str) -> None:
    buffer = io.BytesIO()
    files = {"0": bytes(20_000_000)} if kind == "one large file" else dict.fromkeys(map(str, range(10_001)), b"")
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("core.yaml", "icl_tasks: []")
        for name, content in files.items():
            archive.writestr(f"eval_data/{name}", content, zipfile.ZIP_DEFLATED if content else zipfile.ZIP_STORED)
    (tmp_path / "core.zip").write_bytes(buffer.getvalue())
    (tmp_path / "out").mkdir()
    refuse(lambda: unpack(tmp_path / "core.zip", tmp_path / "out"), "more than it can hold")
    assert list((tmp_path / "out").iterdir()) == []


def test_holes_are_what_they_seem(tmp_path: Path) -> None:
    """The trap of the tests above: a terabyte that the disk does not have."""
    hole(tmp_path / "x")
    status = (tmp_path / "x").stat()
    assert status.st_size == 1 << 40
    assert status.st_blocks < 100
