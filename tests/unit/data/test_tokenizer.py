"""Tokenizers: exact bytes, equal ids in tiktoken, tokenizers and transformers, and files that cannot be trusted."""

from __future__ import annotations

import io
import json
import pickle
import random
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle_tokenizer import bpe_ids

from gptlab.config.errors import UserError
from gptlab.config.run import TokenizerConfig
from gptlab.data.tokenizer import bpe
from gptlab.data.tokenizer.bpe import MOST_READ, BpeTokenizer, safe_parts, spread_share
from gptlab.data.tokenizer.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from gptlab.runtime.files import plain_file
from gptlab.runtime.records.console import Console

# fmt: off
SNIPPETS = [
    "<|bos|>", "<|endoftext|>", "hello world", "don't", "WE'LL", "I'\u017f", "def f(x):\n    return x\n", "\r\n",
    "\n\n\n", "\t\t", " ", "  ", "     ", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\v", "\0", "1", "1234567890",
    "३४५", "½", "\u216b", "naïve", "e\u0301", "中文字符", "日本語", "العربية", "हिन्दी", "😀", "👩\u200d👩\u200d👧",
    "🏳\ufe0f\u200d🌈", "\ufeff", "\ufffd", "\U0010ffff", "_", "__init__", "====", "!?", "aaaa", "'s", "--", "\u200d",
    "A",
]
# fmt: on
MULTILINGUAL = " ".join(SNIPPETS) * 3

texts = st.one_of(st.text(), st.lists(st.sampled_from(SNIPPETS)).map("".join))
shared_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def library_sources(limit_bytes: int) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(folder.glob("*.py")):
        if sum(map(len, found)) > limit_bytes:
            break
        found.append(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return library_sources(800_000)


@pytest.fixture(scope="module")
def trained(sources: list[str]) -> BpeTokenizer:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=1500), [*sources, MULTILINGUAL], bos=True)
    assert isinstance(tokenizer, BpeTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(trained: BpeTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe")
    trained.save(path)
    return path


@pytest.fixture(scope="module")
def hf(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def check_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    data = text.encode()
    assert ids.dtype == np.int32
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(data)
    assert tokenizer.bos_id is None or tokenizer.bos_id not in ids


# --- what each kind does ---


def test_bpe_by_hand() -> None:
    tokenizer = BpeTokenizer([(b"a", b"a"), (b"aa", b"b"), (b" ", b"aab")], max_digits=2)
    assert tokenizer.vocab_size == 260
    assert tokenizer.bos_id == 259
    assert tokenizer.encode("aab").tolist() == [257]
    assert tokenizer.encode("aaab").tolist() == [256, 97, 98]  # leftmost first: aa|a|b
    assert tokenizer.encode("x aab").tolist() == [120, 258]
    assert tokenizer.encode("123").tolist() == [49, 50, 51]
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [2, 3, 4, 0]
    assert tokenizer.decode([120, 258, 259]) == "x aab"


def test_training_by_hand() -> None:
    """ "ab" occurs 5 times, then " ab" 4 times; the digits of 1212 stay apart, since a piece holds one."""
    config = TokenizerConfig(vocab_size=259, max_digits=1)
    tokenizer = train_tokenizer(config, ["ab ab ab ab ab 1212 1212 1212"], bos=True)
    assert tokenizer.merges == ((b"a", b"b"), (b" ", b"ab"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("max_digits", "merges"), [(2, 5), (3, 6), (5, 8)])
def test_digit_limit(max_digits: int, merges: int) -> None:
    """A piece of n digits gives n - 1 merges: 98|76|54|32|10, 987|654|321|0, 98765|43210."""
    config = TokenizerConfig(vocab_size=257 + merges, max_digits=max_digits)
    tokenizer = train_tokenizer(config, ["9876543210 " * 9], bos=True)
    assert tokenizer.token_bytes.max() == max_digits
    assert tokenizer.encode("9876543210").size == -(-10 // max_digits)
    with pytest.raises(UserError, match=f"nearest valid: {257 + merges}"):
        train_tokenizer(TokenizerConfig(vocab_size=300, max_digits=max_digits), ["9876543210 " * 9], bos=True)


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"  # half a character: lossy as text,
    assert tokenizer.token_bytes[0xC3] == 1  # but one byte long


def test_char_tokenizer_is_nanogpts() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["hello", "wé\n"], bos=False)
    characters = sorted(set("hellowé\n"))
    assert tokenizer.encode("whé\n").tolist() == [characters.index(c) for c in "whé\n"]
    assert tokenizer.vocab_size == len(characters)
    assert tokenizer.bos_id is None
    assert tokenizer.token_bytes.tolist() == [len(c.encode()) for c in characters]
    with_bos = CharTokenizer(characters, bos=True)
    assert with_bos.bos_id == len(characters) == with_bos.vocab_size - 1
    assert with_bos.token_bytes[-1] == 0


@pytest.mark.parametrize("text", ["help", "hello 😀", "\U0010ffff"])
def test_char_names_the_unknown_character(text: str) -> None:
    unknown = next(c for c in text if c not in "helo ")
    with pytest.raises(UserError, match=f"U\\+{ord(unknown):04X}"):
        CharTokenizer("helo ", bos=False).encode(text)


def test_char_encodes_a_long_text_in_little_memory() -> None:
    """Four bytes for each id, and little besides: a corpus may be one document."""
    text = "abc\n" * 500_000
    tokenizer = CharTokenizer(text, bos=False)
    tracemalloc.start()
    ids = tokenizer.encode(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(ids, np.tile(np.int32([1, 2, 3, 0]), 500_000))
    assert peak < 6 * len(text)
    for wrong, where in (("é", r"'é' \(U\+00E9\)"), ("\ud800", "at character 2000000")):
        with pytest.raises(UserError, match=where):
            tokenizer.encode(text + wrong)


@given(text=texts)
@shared_fixture
def test_every_kind_is_exact_in_bytes(trained: BpeTokenizer, text: str) -> None:
    check_exact(trained, text)
    check_exact(ByteTokenizer(), text)
    check_exact(CharTokenizer(text + "<|bos|>", bos=True), text)


def test_library_sources_are_exact_and_batches_are_the_same(trained: BpeTokenizer, sources: list[str]) -> None:
    for text, ids in zip(sources, trained.encode_batch(sources), strict=True):
        assert trained.decode_bytes(ids) == text.encode()
        assert np.array_equal(ids, trained.encode(text))
    assert trained.encode_batch([]) == []
    assert [ids.size for ids in trained.encode_batch(["", "a", ""])] == [0, 1, 0]


def test_short_texts_are_encoded_many_at_a_time(trained: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's task for each of many short documents would cost more than encoding them."""
    n_tasks = 0

    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            nonlocal n_tasks
            n_tasks += 1
            return super().submit(*arguments, **more)

    monkeypatch.setattr(bpe, "ThreadPoolExecutor", Pool)
    texts = ["", *(f"document {number}" for number in range(1000)), ""]
    monkeypatch.setattr(bpe, "TASK_CHARACTERS", 1000)
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert trained.decode(ids) == text
    assert n_tasks == 12  # 11,890 characters


def test_bos_decodes_to_nothing_and_ids_are_checked(trained: BpeTokenizer) -> None:
    assert trained.bos_id == 1499
    assert trained.token_bytes[1499] == 0
    assert trained.decode([1499, *trained.encode("x"), 1499]) == "x"
    for wrong in (-1, 1500):
        with pytest.raises(ValueError, match="between 0 and 1499"):
            trained.decode([wrong])


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(trained: BpeTokenizer, text: str) -> None:
    for tokenizer in (trained, ByteTokenizer(), CharTokenizer("ab", bos=False)):
        with pytest.raises(UserError, match="lone surrogate"):
            tokenizer.encode(text)
        with pytest.raises(UserError, match="lone surrogate"):
            tokenizer.encode_batch([text])
    for kind in ("bpe", "char"):
        with pytest.raises(UserError, match="lone surrogate"):
            train_tokenizer(TokenizerConfig(kind=kind, vocab_size=257), [text], bos=True)  # type: ignore[arg-type]


def test_split_pattern_by_hand() -> None:
    text = "I'll  say 'hello_world' 12345!!\n\n  x=1\r\n\t end  "
    pieces = [
        "I",
        "'ll",
        " ",
        " say",
        " '",
        "hello",
        "_world",
        "'",
        " ",
        "123",
        "45",
        "!!\n\n",
        " ",
        " x",
        "=",
        "1",
        "\r\n",
    ]
    assert regex.findall(bpe.gpt4_pattern(3), text) == [*pieces, "\t", " end", "  "]


@given(text=texts)
def test_split_pattern_is_gpt4s(text: str) -> None:
    """As tiktoken 0.14 has it (`tiktoken_ext.openai_public.cl100k_base`), whose limit is three digits.

    The sign at the end: only blanks after a newline at the very end of a text are cut otherwise there.
    """
    published = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    )
    assert regex.findall(bpe.gpt4_pattern(3), text + ".") == regex.findall(published, text + ".")


# --- equal ids in three libraries ---


@given(text=texts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_ids_equal_those_of_tokenizers_and_of_the_textbook(
    trained: BpeTokenizer, hf: tokenizers.Tokenizer, text: str
) -> None:
    ids = trained.encode(text).tolist()
    assert ids == hf.encode(text).ids
    # The `regex` module knows older Unicode than the two engines; what it calls unassigned may be a letter to them.
    if all(ord(character) < 0x3000 or character in MULTILINGUAL for character in text):
        assert ids == bpe_ids(text, trained.pre_tokenizer.pattern, trained.merges)


def test_ids_are_equal_on_library_sources(trained: BpeTokenizer, hf: tokenizers.Tokenizer, sources: list[str]) -> None:
    unseen = library_sources(1_300_000)[len(sources) :]
    for text in [*sources[:5], *unseen, unseen[0].replace("\n", "\r\n"), " ".join(map(str, range(5000)))]:
        assert trained.encode(text).tolist() == hf.encode(text).ids


def test_both_engines_know_the_same_unicode(trained: BpeTokenizer, hf: tokenizers.Tokenizer) -> None:
    """Code points between a letter, a digit and a space: the two regex engines could class one differently."""
    # No letter or digit is beyond U+323AF but for language tags; of the rest a sample will do.
    everything = [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200), *range(0x32400, 0x110000, 257)]
    for start in range(0, len(everything), 1 << 14):
        codes = everything[start : start + (1 << 14)]
        text = "".join(f"a{chr(code)}1{chr(code)} " for code in codes)
        assert trained.encode(text).tolist() == hf.encode_batch_fast([text])[0].ids


def test_transformers_loads_every_kind_and_agrees(trained: BpeTokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    characters = CharTokenizer(MULTILINGUAL, bos=True)
    for tokenizer in (trained, ByteTokenizer(), characters, CharTokenizer(MULTILINGUAL, bos=False)):
        path = tmp_path / f"{tokenizer.kind}{tokenizer.bos_id}"
        tokenizer.save(path)
        plain = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
            theirs = loader.from_pretrained(path)
            assert len(theirs) == tokenizer.vocab_size
            assert theirs.bos_token_id == tokenizer.bos_id
            generator = random.Random(1)
            for text in ["", "a<|bos|> b", *("".join(generator.choices(SNIPPETS, k=20)) for _ in range(50))]:
                ids = tokenizer.encode(text).tolist()
                assert theirs(text, add_special_tokens=False)["input_ids"] == ids == plain.encode(text).ids
                assert theirs.decode(ids) == text
        # transformers writes the file again in its own words: it is still the same tokenizer.
        theirs.save_pretrained(path)
        assert load_tokenizer(path).fingerprint == tokenizer.fingerprint


def test_special_token_in_text_is_text(trained: BpeTokenizer, hf: tokenizers.Tokenizer) -> None:
    assert trained.decode(trained.encode("<|bos|>")) == "<|bos|>"
    assert trained.bos_id not in hf.encode("<|bos|>").ids
    assert trained.bos_id == hf.token_to_id("<|bos|>")


# --- long texts ---


@given(text=texts, characters=st.integers(1, 9))
@shared_fixture
def test_safe_parts_change_no_id(trained: BpeTokenizer, text: str, characters: int) -> None:
    parts = list(safe_parts(text, trained.pre_tokenizer, characters))
    assert "".join(parts) == text
    assert np.array_equal(np.concatenate([trained.encode(part) for part in parts]), trained.encode(text))


def test_long_documents_are_encoded_in_parts(trained: BpeTokenizer, sources: list[str]) -> None:
    text = "".join(sources)
    assert len(list(safe_parts(text, trained.pre_tokenizer))) >= 3
    assert max(map(len, safe_parts(text, trained.pre_tokenizer))) < 1.1 * bpe.PART_CHARACTERS
    assert np.array_equal(trained.encode(text), trained._encode_part(text))


@given(text=st.text(alphabet=" \t\n\r\u00a0\u3000\x1ca1.é'", max_size=30))
@example(text="a   \rb").via("a newline after the blanks takes them")
@example(text=".\n   a   ").via("the last blank goes with a letter; at the end there is none")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_taking_out_long_blanks_changes_no_id(trained: BpeTokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "LONG_BLANK", 2)
        pieces = [trained._ids(encoding, piece) for encoding, piece in trained._around_blanks(text)]
    assert np.array_equal(np.concatenate(pieces), trained.encode(text))


@pytest.mark.parametrize(
    "text",
    ["ab" * 100_000, " " * 1_000_000, "x" + " \t" * 500_000 + "x\n", "\n" * 200_000, "7" * 200_000, "😀" * 50_000],
    ids=["pairs", "spaces", "blanks", "newlines", "digits", "emoji"],
)  # fmt: skip
def test_long_texts_without_a_break(trained: BpeTokenizer, hf: tokenizers.Tokenizer, text: str) -> None:
    """tiktoken's regex gives up on a million blanks; others were quadratic in old versions: minutes for these."""
    started = time.process_time()
    ids = trained.encode(text)
    assert time.process_time() - started < 10  # 0.4 s at the most, measured on a quiet machine
    assert trained.decode_bytes(ids) == text.encode()
    assert ids.tolist() == hf.encode_batch_fast([text])[0].ids


# --- training ---


def test_training_is_deterministic(trained: BpeTokenizer, sources: list[str]) -> None:
    again = train_tokenizer(TokenizerConfig(vocab_size=1500), [*sources, MULTILINGUAL], bos=True)
    assert again.fingerprint == trained.fingerprint


def test_training_does_not_depend_on_how_text_is_cut_into_portions(
    sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TokenizerConfig(vocab_size=700)
    text = "".join(sources[:8])
    whole = train_tokenizer(config, [text], bos=True)
    for characters in (500, len(text)):
        monkeypatch.setattr("gptlab.data.tokenizer.bpe.PORTION_CHARACTERS", characters)
        assert train_tokenizer(config, [text], bos=True).fingerprint == whole.fingerprint


@pytest.mark.parametrize("text", ["ACGT" * 5000, "中" * 20_000, " " * 20_000])
def test_the_trainer_gets_no_long_piece(trained: BpeTokenizer, text: str) -> None:
    """Learning takes it the square of a piece's length."""
    portions = list(bpe._cut(text, trained.pre_tokenizer))
    assert "".join(portions) == text
    assert max(map(len, portions)) <= 4096


def test_every_line_and_word_can_be_cut_off(trained: BpeTokenizer) -> None:
    """Whatever its script: long texts are shared among the cores, and the trainer gets no word cut in two."""
    text = "кот и пёс\n    x = {1,\n        2}\n中文\n日本"
    assert list(safe_parts(text, trained.pre_tokenizer, 1)) == [
        "кот", " и", " пёс\n", "    x", " =", " {1,\n", "        2}\n", "中文\n", "日本",
    ]  # fmt: skip


def test_learning_merges_is_shown_as_work_under_way(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library learns after the last text was read, for several seconds: silence would look like a hang."""
    shown: list[str] = []

    @contextmanager
    def busy(console: Console, description: str) -> Iterator[None]:
        shown.append(f"begin {description}")
        yield
        shown.append("end")

    monkeypatch.setattr(Console, "busy", busy)
    with Console(stream=io.StringIO()) as console:
        train_tokenizer(TokenizerConfig(vocab_size=300), sources[:2], bos=True, console=console)
    assert shown == ["begin learning the merges of 300 tokens", "end"]


def test_training_stops_at_train_bytes() -> None:
    config = TokenizerConfig(vocab_size=258, train_bytes=9)
    tokenizer = train_tokenizer(config, ["ab ab ", "ab" + "é" * 1000], bos=True)  # sees "ab ab ab", and half an é
    assert tokenizer.merges == ((b"a", b"b"),)  # type: ignore[attr-defined]


def test_training_text_is_spread_where_its_size_has_a_limit() -> None:
    """The first documents alone would teach only "ab"; of text ten times as long, the rest is not read."""
    config = TokenizerConfig(vocab_size=259, train_bytes=40)
    texts = ["abab\n"] * 10 + ["cdcd\n"] * 10
    shares = {most: spread_share(config, texts, most) for most in (None, 40, 1000)}
    assert shares == {None: 1, 40: 1, 1000: 0.4}
    merges = {
        share: train_tokenizer(config, texts, bos=True, share=share).merges[:2]  # type: ignore[attr-defined]
        for share in (1, 0.4)
    }
    assert merges[1] == ((b"a", b"b"), (b"ab", b"ab"))
    assert set(merges[0.4]) == {(b"a", b"b"), (b"c", b"d")}
    read = iter(texts * 1000)
    assert spread_share(config, read, 10**9) == 1 / MOST_READ
    assert len([*read]) == 20_000 - 40 * MOST_READ / 5


def test_vocabulary_larger_than_the_text_gives() -> None:
    with pytest.raises(UserError, match=r"vocab_size = 4096: .*nearest valid: 260\)") as caught:
        train_tokenizer(TokenizerConfig(), ["abc abc"], bos=True)
    nearest = caught.value.nearest  # type: ignore[attr-defined]
    assert train_tokenizer(TokenizerConfig(vocab_size=nearest), ["abc abc"], bos=True).vocab_size == nearest


def test_bad_training_input() -> None:
    for kind in ("bpe", "char"):
        with pytest.raises(UserError, match=r"no text|at least one character"):
            train_tokenizer(TokenizerConfig(kind=kind), [], bos=True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max_digits"):
        train_tokenizer(TokenizerConfig(max_digits=100_000), ["x"], bos=True)

    def broken() -> Any:
        yield "text"
        raise UserError("from the corpus")

    with pytest.raises(UserError, match="from the corpus"):
        train_tokenizer(TokenizerConfig(), broken(), bos=True)


# --- on disk ---


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "char without bos"])
def test_save_and_load(kind: str, trained: BpeTokenizer, tmp_path: Path) -> None:
    characters = CharTokenizer(MULTILINGUAL, bos=kind == "char")
    tokenizer = {"bpe": trained, "byte": ByteTokenizer()}.get(kind, characters)
    tokenizer.save(tmp_path / "new" / "folder")
    tokenizer.save(tmp_path / "new" / "folder")  # over what is there
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.kind == tokenizer.kind
    assert load_tokenizer(tmp_path / "new" / "folder" / "tokenizer.json").fingerprint == tokenizer.fingerprint
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.bos_id == tokenizer.bos_id
    assert np.array_equal(loaded.token_bytes, tokenizer.token_bytes)
    assert np.array_equal(loaded.encode(MULTILINGUAL), tokenizer.encode(MULTILINGUAL))


def test_fingerprints_differ(trained: BpeTokenizer) -> None:
    merges = list(trained.merges)
    others: list[Tokenizer] = [
        trained,
        BpeTokenizer(merges, 3),
        BpeTokenizer(merges[:-1], 2),
        BpeTokenizer([], 2),
        ByteTokenizer(),
        CharTokenizer("ab", bos=True),
        CharTokenizer("ab", bos=False),
        CharTokenizer("ac", bos=True),
    ]
    assert len({tokenizer.fingerprint for tokenizer in others}) == len(others)


def test_a_worker_process_can_be_given_a_tokenizer(trained: BpeTokenizer) -> None:
    """multiprocessing pickles its arguments; nothing else here does."""
    assert np.array_equal(pickle.loads(pickle.dumps(trained)).encode("hello"), trained.encode("hello"))


def swap(model: dict[str, Any], first: str, second: str) -> None:
    vocab = model["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "two ids swapped": lambda c: swap(c["model"], "a", "b"),
    "an id missing": lambda c: c["model"]["vocab"].pop("a"),
    "an id too large": lambda c: c["model"]["vocab"].update(a=10**9),
    "an id no number": lambda c: c["model"]["vocab"].update(a="1"),
    "no bos": lambda c: c["model"]["vocab"].pop("<|bos|>"),
    "an entry too many": lambda c: c["model"]["vocab"].update(zzzzzz=1500),
    "no vocab": lambda c: c["model"].pop("vocab"),
    "vocab a list": lambda c: c["model"].update(vocab=[]),
    "merges swapped": lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop()),
    "merge twice": lambda c: c["model"]["merges"].append(c["model"]["merges"][0]),
    "merge missing": lambda c: c["model"]["merges"].pop(),
    "merge of three": lambda c: c["model"]["merges"][0].append("x"),
    "merge of what is not there": lambda c: c["model"]["merges"].append(["zzzz", "qqqq"]),
    "merge of strange characters": lambda c: c["model"]["merges"].append(["中", "a"]),
    "merge no text": lambda c: c["model"]["merges"].append([1, 2]),
    "merges null": lambda c: c["model"].update(merges=None),
    "model null": lambda c: c.update(model=None),
    "dropout": lambda c: c["model"].update(dropout=0.1),
    "another model": lambda c: c["model"].update(type="WordPiece"),
    "normalizer": lambda c: c.update(normalizer={"type": "Lowercase"}),
    "another pattern": lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="(a+)+$"),
    "pattern with a flaw": lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="\\p{N}{1,2}|("),
    "huge digit limit": lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="\\p{N}{1,9999}"),
    "prefix space": lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "no pre-tokenizer": lambda c: c.update(pre_tokenizer=None),
    "pre-tokenizer a number": lambda c: c.update(pre_tokenizer=5),
    "pre-tokenizer of byte": lambda c: c.update(pre_tokenizer={"type": "ByteLevel"}),
    "parts missing": lambda c: [c.pop(key) for key in list(c)],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_tokenizers_are_refused(
    folder: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], object]
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    damage(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"null", b'"x"', b"{", b"[" * 200_000, b'{"model": {"type": "BPE", "vocab": {"ab": 0}, '
     b'"merges": []}, "pre_tokenizer": null}', b'{"model": {"vocab": {"\\ud800": 0}}, "pre_tokenizer": null}',
     b'{"model": {"vocab": {}}, "pre_tokenizer": null}', b'{"model": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no tokenizer in"):
            load_tokenizer(path)


def test_another_kind_of_model_is_named(tmp_path: Path) -> None:
    """As BERT's, whose pre-tokenizer has another form too."""
    content = {"model": {"type": "WordPiece", "vocab": {"a": 0}}, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="its model is WordPiece, and gptlab reads byte-level BPE;"):
        load_tokenizer(tmp_path)


def test_the_vocabulary_of_another_tool_is_named(tmp_path: Path) -> None:
    """Its parts fit, but its first entry is the special token."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    theirs.train_from_iterator(["hello hello"], trainer)
    theirs.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="GPT-2's: its vocab is not what gptlab or GPT-2 would have;"):
        load_tokenizer(tmp_path)


def test_any_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer([(b"a", b"a"), (b"aa", b"b"), (b" ", b"aab")], max_digits=2)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    original = path.read_bytes()
    generator = random.Random(1)
    refused = 0
    for _ in range(300):
        at = generator.randrange(len(original))
        path.write_bytes(original[:at] + bytes([generator.randrange(256)]) + original[at + 1 :])
        try:
            assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
        except UserError:
            refused += 1
    assert refused > 150


def test_a_failed_save_is_one_line_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ByteTokenizer().save(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plain_file, "flush_to_disk", full)
    with pytest.raises(UserError, match="No space left"):
        CharTokenizer("ab", bos=True).save(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
